#include "serve/blocks.h"

#include <bit>
#include <string>

namespace surogate::serve {
namespace {

// What a hash begins with, so that a root is never the name of a block.
constexpr uint64_t kRoot = 1, kBlock = 2;

[[noreturn]] void fail(int32_t block, const std::string &what) {
  throw Error("cache block " + std::to_string(block) + ": " + what);
}

}  // namespace

BlockPool::BlockPool(int32_t num_blocks, int32_t block_size, HashKey key) : block_size_(block_size), key_(key) {
  if (num_blocks < 1 || block_size < 1) {
    throw Error("a pool of " + std::to_string(num_blocks) + " cache blocks of " + std::to_string(block_size) +
                " tokens: both must be at least 1");
  }
  blocks_.resize(num_blocks);
  table_.assign(std::bit_ceil(2 * static_cast<size_t>(num_blocks)), -1);
  mask_ = table_.size() - 1;
  for (int32_t block = num_blocks; block-- > 0;) push_free(block);
}

// -- names ----------------------------------------------------------------------------------------------------------

Hash128 BlockPool::root(std::span<const Extra> extras) const {
  SipHash hash(key_);
  hash.update_number(kRoot);
  for (const Extra &extra : extras) {
    hash.update_number(static_cast<uint64_t>(extra.kind));
    hash.update_number(extra.value.size());  // or "ab" and "c" would be "a" and "bc"
    hash.update(extra.value.data(), extra.value.size());
  }
  return hash.finish();
}

Hash128 BlockPool::next(Hash128 parent, std::span<const int32_t> block_tokens) const {
  if (block_tokens.size() != static_cast<size_t>(block_size_)) {
    throw Error("a cache block of " + std::to_string(block_size_) + " tokens was to be named by " +
                std::to_string(block_tokens.size()));
  }
  SipHash hash(key_);
  hash.update_number(kBlock);
  hash.update_number(parent.low);
  hash.update_number(parent.high);
  hash.update(block_tokens.data(), block_tokens.size_bytes());
  return hash.finish();
}

void BlockPool::extend(std::vector<Hash128> &chain, Hash128 root, std::span<const int32_t> tokens) const {
  const size_t size = static_cast<size_t>(block_size_);
  for (size_t i = chain.size(); (i + 1) * size <= tokens.size(); ++i) {
    chain.push_back(next(i == 0 ? root : chain[i - 1], tokens.subspan(i * size, size)));
  }
}

// -- the table ------------------------------------------------------------------------------------------------------

size_t BlockPool::slot_of(Hash128 name) const {
  size_t slot = name.low & mask_;
  while (table_[slot] >= 0 && blocks_[table_[slot]].name != name) slot = (slot + 1) & mask_;
  return slot;
}

void BlockPool::unpublish(int32_t block) {
  size_t hole = slot_of(blocks_[block].name);
  // Whatever lies behind, up to the next empty slot, and may stand in the hole moves there: no search meets a gap.
  for (size_t slot = (hole + 1) & mask_; table_[slot] >= 0; slot = (slot + 1) & mask_) {
    const size_t wanted = blocks_[table_[slot]].name.low & mask_;
    if (((slot - wanted) & mask_) >= ((slot - hole) & mask_)) {
      table_[hole] = table_[slot];
      hole = slot;
    }
  }
  table_[hole] = -1;
  blocks_[block].published = false;
}

// -- the lists ------------------------------------------------------------------------------------------------------

void BlockPool::push_free(int32_t block) {
  blocks_[block].next = first_free_;
  first_free_ = block;
  ++num_free_;
}

int32_t BlockPool::pop_free() {
  const int32_t block = first_free_;
  first_free_ = blocks_[block].next;
  --num_free_;
  return block;
}

void BlockPool::append_cached(int32_t block) {
  blocks_[block].previous = newest_;
  blocks_[block].next = -1;
  (newest_ < 0 ? oldest_ : blocks_[newest_].next) = block;
  newest_ = block;
  ++num_cached_;
}

void BlockPool::remove_cached(int32_t block) {
  const Block &entry = blocks_[block];
  (entry.previous < 0 ? oldest_ : blocks_[entry.previous].next) = entry.next;
  (entry.next < 0 ? newest_ : blocks_[entry.next].previous) = entry.previous;
  --num_cached_;
}

// -- blocks ---------------------------------------------------------------------------------------------------------

const BlockPool::Block &BlockPool::checked(int32_t block) const {
  if (block < 0 || block >= num_blocks()) fail(block, "the pool has " + std::to_string(num_blocks()));
  return blocks_[block];
}

BlockPool::Block &BlockPool::held(int32_t block) {
  if (checked(block).holders == 0) fail(block, "nobody holds it");
  return blocks_[block];
}

int32_t BlockPool::find(std::span<const Hash128> chain) const {
  int32_t found = 0;
  for (const Hash128 name : chain) {
    if (lookup(name) < 0) break;
    ++found;
  }
  return found;
}

int32_t BlockPool::match(std::span<const Hash128> chain, std::span<int32_t> blocks) {
  if (blocks.size() < chain.size()) {
    throw Error("room for " + std::to_string(blocks.size()) + " cache blocks where up to " +
                std::to_string(chain.size()) + " are found");
  }
  int32_t found = 0;
  for (const Hash128 name : chain) {
    const int32_t block = lookup(name);
    if (block < 0) break;
    if (blocks_[block].holders++ == 0) remove_cached(block);
    blocks[found++] = block;
  }
  queries_ += static_cast<int64_t>(chain.size()) * block_size_;
  hits_ += static_cast<int64_t>(found) * block_size_;
  return found;
}

bool BlockPool::allocate(std::span<int32_t> blocks) {
  if (blocks.size() > static_cast<size_t>(available())) return false;
  for (int32_t &block : blocks) {
    if (num_free_ > 0) {
      block = pop_free();
    } else {
      block = oldest_;
      remove_cached(block);
      unpublish(block);
      ++evictions_;
    }
    blocks_[block].holders = 1;
  }
  return true;
}

void BlockPool::hold(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) ++held(block).holders;
}

void BlockPool::release(std::span<const int32_t> blocks) {
  for (size_t i = blocks.size(); i-- > 0;) {
    Block &entry = held(blocks[i]);
    if (--entry.holders > 0) continue;
    if (entry.published) {
      append_cached(blocks[i]);
    } else {
      push_free(blocks[i]);
    }
  }
}

void BlockPool::publish(int32_t block, Hash128 name) {
  Block &entry = held(block);
  if (entry.published) {
    if (entry.name != name) fail(block, "it is published under another name already");
    return;
  }
  const int32_t other = lookup(name);
  if (other >= 0) {
    if (blocks_[other].holders > 0) return;
    remove_cached(other);
    unpublish(other);
    push_free(other);
  }
  entry.name = name;
  entry.published = true;
  table_[slot_of(name)] = block;
}

void BlockPool::forget() {
  while (oldest_ >= 0) {
    const int32_t block = oldest_;
    remove_cached(block);
    push_free(block);
  }
  for (Block &block : blocks_) block.published = false;
  table_.assign(table_.size(), -1);
}

BlockStats BlockPool::stats() const {
  BlockStats stats;
  stats.total = num_blocks();
  stats.free = num_free_;
  stats.cached = num_cached_;
  stats.used = stats.total - stats.free - stats.cached;
  stats.queries = queries_;
  stats.hits = hits_;
  stats.evictions = evictions_;
  return stats;
}

}  // namespace surogate::serve
