// The blocks of a key/value cache: who holds which, what is in them, and which one goes first.
//
// A block is free (nothing of worth in it), used (at least one sequence holds it) or cached (nobody holds it, but what
// is in it has a name, and whoever asks for that name gets it). The name is a keyed hash over the block before it and
// its own tokens, so it stands for the whole text up to there. The first block's predecessor is the `root`, a hash over
// what else decides the contents: which model, which adapter, whose salt.
//
// Cached blocks go least recently used first, and of one sequence the last block first, so that no chain loses a block
// before those that hang on it. Nothing here allocates after the constructor (but `extend`, the caller's chain), and
// every operation costs O(1) a block. Not for several threads at once.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "error.h"
#include "serve/hash.h"

namespace surogate::serve {

// What beside the tokens decides what is in a block. The kind goes into the hash: an adapter called "a" is not a salt
// "a". The numbers are those that are hashed.
enum class ExtraKind : uint32_t { kModelGeneration = 1, kAdapter = 2, kSalt = 3, kImage = 4 };

struct Extra {
  ExtraKind kind;
  std::string_view value;  // any bytes
};

struct BlockStats {
  int64_t total = 0, free = 0, cached = 0, used = 0;  // blocks, now; free + cached + used = total
  int64_t queries = 0, hits = 0;                      // tokens asked for and found, since the start
  int64_t evictions = 0;                              // cached blocks given to somebody else, since the start
};

class SUROGATE_API BlockPool {
 public:
  // block_size: tokens a block. Throws where a number is below 1.
  BlockPool(int32_t num_blocks, int32_t block_size, HashKey key);

  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int32_t block_size() const { return block_size_; }

  // -- names: a request computes its chain once and keeps it --
  Hash128 root(std::span<const Extra> extras) const;                         // the order of the extras counts
  Hash128 next(Hash128 parent, std::span<const int32_t> block_tokens) const;  // exactly block_size tokens
  // Appends the names of all whole blocks of `tokens` that `chain` has no name of yet.
  void extend(std::vector<Hash128> &chain, Hash128 root, std::span<const int32_t> tokens) const;

  // -- blocks --
  int32_t available() const { return num_free_ + num_cached_; }  // how many `allocate` can give

  // How many of the chain's first blocks are in the cache. Holds nothing, counts nothing.
  int32_t find(std::span<const Hash128> chain) const;
  // The same blocks, held for the caller and written to `blocks` (of chain.size() at least). Counted in the statistics.
  int32_t match(std::span<const Hash128> chain, std::span<int32_t> blocks);

  // Fills `blocks` with blocks for the caller alone: free ones, then the least recently used cached ones. False, with
  // nothing done, where there are not as many.
  bool allocate(std::span<int32_t> blocks);

  void hold(std::span<const int32_t> blocks);  // once more, for another sequence; they are held already
  // Given back once each, the last first: pass a sequence's blocks in their order. What is published and held by nobody
  // stays in the cache, anything else is free.
  void release(std::span<const int32_t> blocks);

  // Names a full block that the caller holds, whose contents are computed. Where another block has the name already the
  // one in use keeps it (two in use: the earlier), so that the other is free once it is released.
  void publish(int32_t block, Hash128 name);

  // Forgets all names: cached blocks become free, used ones are free once they are released.
  void forget();

  bool is_published(int32_t block) const { return checked(block).published; }
  int32_t holders(int32_t block) const { return checked(block).holders; }
  BlockStats stats() const;

 private:
  struct Block {
    Hash128 name;
    int32_t holders = 0;
    int32_t previous = -1, next = -1;  // of the cached ones, in order of use; `next` alone: of the free ones
    bool published = false;
  };

  const Block &checked(int32_t block) const;
  Block &held(int32_t block);  // throws where nobody holds it
  void push_free(int32_t block);
  int32_t pop_free();
  void append_cached(int32_t block);
  void remove_cached(int32_t block);
  size_t slot_of(Hash128 name) const;  // where the name is, or the empty slot where it would be
  int32_t lookup(Hash128 name) const { return table_[slot_of(name)]; }
  void unpublish(int32_t block);

  std::vector<Block> blocks_;
  std::vector<int32_t> table_;  // open addressing: a block, or -1; at most half full
  size_t mask_;
  int32_t block_size_;
  HashKey key_;
  int32_t first_free_ = -1, num_free_ = 0;
  int32_t oldest_ = -1, newest_ = -1, num_cached_ = 0;
  int64_t queries_ = 0, hits_ = 0, evictions_ = 0;
};

}  // namespace surogate::serve
