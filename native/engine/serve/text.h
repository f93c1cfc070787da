// From token ids to text: bytes become whole characters, and stop strings are found across the borders of tokens.
//
// What comes out are pieces, one a token, in the order of the tokens. A piece comes out once all its text is certain:
// whole characters, and nothing that may still turn out to be part of a stop string. Tokens are not cut in two for
// that, so that a token that means something by itself (a marker of a model's format) arrives once and at its place,
// behind all text that came before it. A character that several tokens make up belongs to the one that completed it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace surogate::serve {

// The bytes of every token id, and which ids are special.
class SUROGATE_API Tokenizer {
 public:
  // Token i is bytes [offsets[i], offsets[i + 1]) of `bytes`; special[i] is not 0 where it is special. Throws where the
  // sizes do not fit.
  Tokenizer(std::string bytes, std::vector<uint64_t> offsets, std::vector<uint8_t> special);

  int32_t size() const { return static_cast<int32_t>(special_.size()); }
  // Ids that the tokenizer does not know have no bytes: a model's logits may be padded to more than there are tokens.
  std::string_view bytes(int32_t token) const {
    if (token < 0 || token >= size()) return {};
    return std::string_view(bytes_).substr(offsets_[token], offsets_[token + 1] - offsets_[token]);
  }
  bool is_special(int32_t token) const { return token >= 0 && token < size() && special_[token] != 0; }

 private:
  std::string bytes_;
  std::vector<uint64_t> offsets_;
  std::vector<uint8_t> special_;
};

// Any number of strings looked for at once, a byte at a time (Aho-Corasick). Immutable, so that choices share one.
class SUROGATE_API StopStrings {
 public:
  explicit StopStrings(const std::vector<std::string> &stops);  // throws where one is empty

  bool empty() const { return lengths_.empty(); }
  int32_t length(int32_t stop) const { return lengths_[stop]; }  // bytes

  // State 0 is the begin.
  int32_t next(int32_t state, unsigned char byte) const;
  // How many of the last bytes may be the begin of a stop string.
  int32_t depth(int32_t state) const { return nodes_[state].depth; }
  // The longest stop string that ends here, or -1.
  int32_t match(int32_t state) const { return nodes_[state].match; }

 private:
  struct Node {
    int32_t first_child = -1, sibling = -1;
    int32_t shorter = 0;  // the longest proper suffix of this node's string that is a node too
    int32_t depth = 0;
    int32_t match = -1;
    unsigned char byte = 0;
  };

  int32_t child(int32_t node, unsigned char byte) const;
  void add(const std::string &stop, int32_t index);
  void link();

  std::vector<Node> nodes_;
  std::array<int32_t, 256> first_{};  // the begin's children: where nearly every byte of a text is looked up
  std::vector<int32_t> lengths_;
};

// UTF-8 that arrives in parts. Bytes that cannot be part of a character become U+FFFD as soon as that is certain, one
// for each maximal part of a sequence, as Python's and the WHATWG's decoders have it.
class SUROGATE_API Utf8Decoder {
 public:
  void feed(std::string_view bytes, std::string &text);  // appends what is complete
  void finish(std::string &text);                        // what is incomplete becomes one U+FFFD

 private:
  void begin(unsigned char byte, std::string &text);

  char partial_[4] = {};
  int32_t size_ = 0, missing_ = 0;           // bytes of the character so far, and how many more it needs
  unsigned char low_ = 0x80, high_ = 0xBF;  // what the next one may be
};

// (token, text) pairs; `text` is all of them together.
struct Pieces {
  struct Piece {
    int32_t token;
    uint32_t end;  // of its text, in `text`; it begins where the one before ends
  };

  std::string text;
  std::vector<Piece> pieces;

  void add(int32_t token, std::string_view piece) {
    text.append(piece);
    pieces.push_back({token, static_cast<uint32_t>(text.size())});
  }
  void clear() {
    text.clear();
    pieces.clear();
  }
};

struct TextOptions {
  bool include_stop = false;   // the stop string is part of the text
  bool special_text = false;   // special tokens have text too
  int32_t stop_after = -1;     // a token: stop strings count in what comes after it; -1: from the begin
  int32_t opening = -1;        // a token: where another comes first, stop strings count from the begin after all
};

// The text of one choice. Buffers grow to what a choice holds back and are used again.
class SUROGATE_API TextStream {
 public:
  // No stops: a null pointer, or an empty StopStrings.
  TextStream(std::shared_ptr<const Tokenizer> tokenizer, std::shared_ptr<const StopStrings> stops, TextOptions options);

  // Appends the pieces that are certain now. with_text false: as if the token had no bytes (a stop token). True: a stop
  // string is complete, the pieces end there (or before it) and nothing may follow; tokens that lie wholly behind that
  // end have none. The stop string that ends first counts, and of those that end together the longest.
  bool feed(int32_t token, Pieces &out, bool with_text = true);

  // The end of the tokens: appends all that was held back. An incomplete character becomes U+FFFD, as one more piece of
  // the last token. True where that completed a stop string. Does nothing after a stop string.
  bool finish(Pieces &out);

  int32_t stop() const { return stop_; }  // index of the stop string that was found, or -1

 private:
  bool append(int32_t token);  // decoded_ goes to what is held; true: a stop string is complete
  void release(size_t certain, Pieces &out);  // pieces that end within the first `certain` bytes of what is held
  void cut(Pieces &out);                      // the pieces up to the stop string's begin or end
  void compact();

  std::shared_ptr<const Tokenizer> tokenizer_;
  std::shared_ptr<const StopStrings> stops_;
  TextOptions options_;
  Utf8Decoder decoder_;
  std::string decoded_;

  Pieces held_;                  // the first `begin_` bytes and `first_` pieces are out already
  size_t begin_ = 0, first_ = 0;
  size_t stop_end_ = 0;          // in held_.text, once stop_ is set
  int32_t state_ = 0, stop_ = -1, last_ = -1;
  bool matching_, begun_ = false, finished_ = false;
};

}  // namespace surogate::serve
