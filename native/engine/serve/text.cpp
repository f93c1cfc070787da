#include "serve/text.h"

#include <utility>

namespace surogate::serve {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Where the ASCII characters from `at` on end.
size_t ascii_run(std::string_view bytes, size_t at) {
  while (at < bytes.size() && static_cast<unsigned char>(bytes[at]) < 0x80) ++at;
  return at;
}

constexpr size_t kCompactFrom = 4096;  // bytes that are out already, before what is held moves to the front

}  // namespace

// -- tokenizer ------------------------------------------------------------------------------------------------------

Tokenizer::Tokenizer(std::string bytes, std::vector<uint64_t> offsets, std::vector<uint8_t> special)
    : bytes_(std::move(bytes)), offsets_(std::move(offsets)), special_(std::move(special)) {
  if (offsets_.size() != special_.size() + 1) {
    throw Error("the tokenizer has " + std::to_string(special_.size()) + " flags and " +
                std::to_string(offsets_.size()) + " offsets, of which there must be one more");
  }
  bool ascending = offsets_.front() == 0 && offsets_.back() == bytes_.size();
  for (size_t i = 1; i < offsets_.size(); ++i) ascending = ascending && offsets_[i - 1] <= offsets_[i];
  if (!ascending) {
    throw Error("the offsets of the tokenizer's bytes do not ascend from 0 to " + std::to_string(bytes_.size()));
  }
}

// -- stop strings ---------------------------------------------------------------------------------------------------

StopStrings::StopStrings(const std::vector<std::string> &stops) : nodes_(1) {
  for (size_t i = 0; i < stops.size(); ++i) {
    if (stops[i].empty()) throw Error("stop string " + std::to_string(i) + " is empty", "leave it out");
    add(stops[i], static_cast<int32_t>(i));
    lengths_.push_back(static_cast<int32_t>(stops[i].size()));
  }
  link();
}

int32_t StopStrings::child(int32_t node, unsigned char byte) const {
  for (int32_t i = nodes_[node].first_child; i >= 0; i = nodes_[i].sibling) {
    if (nodes_[i].byte == byte) return i;
  }
  return -1;
}

void StopStrings::add(const std::string &stop, int32_t index) {
  int32_t node = 0;
  for (const char character : stop) {
    const unsigned char byte = static_cast<unsigned char>(character);
    int32_t next = child(node, byte);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      Node added;
      added.byte = byte;
      added.depth = nodes_[node].depth + 1;
      added.sibling = std::exchange(nodes_[node].first_child, next);
      nodes_.push_back(added);
      if (node == 0) first_[byte] = next;
    }
    node = next;
  }
  if (nodes_[node].match < 0) nodes_[node].match = index;  // of equal ones the first
}

void StopStrings::link() {
  std::vector<int32_t> order{0};  // by depth: a shorter suffix is linked before what needs it
  order.reserve(nodes_.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const int32_t parent = order[i];
    for (int32_t node = nodes_[parent].first_child; node >= 0; node = nodes_[node].sibling) {
      if (parent != 0) nodes_[node].shorter = next(nodes_[parent].shorter, nodes_[node].byte);
      if (nodes_[node].match < 0) nodes_[node].match = nodes_[nodes_[node].shorter].match;
      order.push_back(node);
    }
  }
}

int32_t StopStrings::next(int32_t state, unsigned char byte) const {
  for (; state != 0; state = nodes_[state].shorter) {
    const int32_t longer = child(state, byte);
    if (longer >= 0) return longer;
  }
  return first_[byte];
}

// -- UTF-8 ----------------------------------------------------------------------------------------------------------

void Utf8Decoder::feed(std::string_view bytes, std::string &text) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char character = bytes[i];
    const unsigned char byte = static_cast<unsigned char>(character);
    if (missing_ == 0) {
      const size_t ascii = ascii_run(bytes, i);
      text.append(bytes, i, ascii - i);
      i = ascii;
      if (i < bytes.size()) begin(static_cast<unsigned char>(bytes[i]), text);
    } else if (byte < low_ || byte > high_) {
      finish(text);
      begin(byte, text);
    } else {
      partial_[size_++] = character;
      low_ = 0x80;
      high_ = 0xBF;
      if (--missing_ == 0) text.append(partial_, static_cast<size_t>(size_));
    }
  }
}

void Utf8Decoder::finish(std::string &text) {
  if (missing_ > 0) text.append(kReplacement);
  missing_ = 0;
}

// The second byte's range is narrower behind four of the first ones: nothing overlong, no surrogates, nothing beyond
// U+10FFFF.
void Utf8Decoder::begin(unsigned char byte, std::string &text) {
  if (byte < 0x80) {
    text.push_back(static_cast<char>(byte));
    return;
  }
  if (byte < 0xC2 || byte > 0xF4) {
    text.append(kReplacement);
    return;
  }
  partial_[0] = static_cast<char>(byte);
  size_ = 1;
  missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
}

// -- stream ---------------------------------------------------------------------------------------------------------

TextStream::TextStream(std::shared_ptr<const Tokenizer> tokenizer, std::shared_ptr<const StopStrings> stops,
                       TextOptions options)
    : tokenizer_(std::move(tokenizer)), stops_(std::move(stops)), options_(options) {
  if (stops_ && stops_->empty()) stops_.reset();
  matching_ = stops_ && options_.stop_after < 0;
}

bool TextStream::feed(int32_t token, Pieces &out, bool with_text) {
  if (stop_ >= 0 || finished_) {
    throw Error("token " + std::to_string(token) + " was fed to a text that has ended");
  }
  last_ = token;
  if (!begun_ && options_.opening >= 0 && token != options_.opening) matching_ = stops_ != nullptr;
  begun_ = true;
  decoded_.clear();
  if (with_text && (options_.special_text || !tokenizer_->is_special(token))) {
    decoder_.feed(tokenizer_->bytes(token), decoded_);
  }
  if (append(token)) {
    cut(out);
    return true;
  }
  if (stops_ && token == options_.stop_after) matching_ = true;
  release(held_.text.size() - (matching_ ? stops_->depth(state_) : 0), out);
  compact();
  return false;
}

bool TextStream::finish(Pieces &out) {
  if (stop_ >= 0 || finished_) return false;
  finished_ = true;
  decoded_.clear();
  decoder_.finish(decoded_);
  if (!decoded_.empty() && append(last_)) {
    cut(out);
    return true;
  }
  release(held_.text.size(), out);
  return false;
}

bool TextStream::append(int32_t token) {
  const size_t begin = held_.text.size();
  held_.add(token, decoded_);
  if (!matching_) return false;
  for (size_t i = begin; i < held_.text.size(); ++i) {
    state_ = stops_->next(state_, static_cast<unsigned char>(held_.text[i]));
    stop_ = stops_->match(state_);
    if (stop_ >= 0) {
      stop_end_ = i + 1;
      return true;
    }
  }
  return false;
}

void TextStream::release(size_t certain, Pieces &out) {
  for (; first_ < held_.pieces.size() && held_.pieces[first_].end <= certain; ++first_) {
    const Pieces::Piece piece = held_.pieces[first_];
    out.add(piece.token, std::string_view(held_.text).substr(begin_, piece.end - begin_));
    begin_ = piece.end;
  }
}

void TextStream::cut(Pieces &out) {
  const size_t end = options_.include_stop ? stop_end_ : stop_end_ - static_cast<size_t>(stops_->length(stop_));
  release(end, out);
  if (begin_ < end) {
    out.add(held_.pieces[first_].token, std::string_view(held_.text).substr(begin_, end - begin_));
  }
}

void TextStream::compact() {
  if (first_ == held_.pieces.size()) {
    held_.clear();
  } else if (begin_ >= kCompactFrom && begin_ * 2 >= held_.text.size()) {
    held_.text.erase(0, begin_);
    held_.pieces.erase(held_.pieces.begin(), held_.pieces.begin() + static_cast<std::ptrdiff_t>(first_));
    for (Pieces::Piece &piece : held_.pieces) piece.end -= static_cast<uint32_t>(begin_);
  } else {
    return;
  }
  begin_ = first_ = 0;
}

}  // namespace surogate::serve
