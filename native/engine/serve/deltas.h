// What the choices of all requests gained, from the loop to whoever polls: flat lists, used again and again.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "serve/request.h"

namespace surogate::serve {

struct Deltas {
  struct Logprob {
    int32_t token;
    float logprob;  // NaN: none (the first token of a prompt)
    int32_t alternatives;
  };
  // Of one choice; the counts are of what it has in the lists below, which are in the items' order.
  struct Item {
    int64_t id;
    int32_t choice;
    int32_t tokens = 0, pieces = 0, logprobs = 0, prompt_logprobs = 0;
    uint32_t text = 0;  // bytes
    int32_t cached_tokens = 0;
    double queued_seconds = -1;  // of its request; -1: it has not begun
    Finish finish = Finish::kNone;
    int32_t stop_token = -1;
    bool has_stop_string = false, has_error = false, has_logprobs = false, has_prompt_logprobs = false;
  };

  std::vector<Item> items;
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<std::pair<int32_t, uint32_t>> pieces;  // token, bytes of its text
  std::vector<Logprob> logprobs;                     // of an item: its tokens', then its prompt's
  std::vector<std::pair<int32_t, float>> alternatives;
  std::vector<std::string> strings;                  // of an item: the stop string, then the error

  bool empty() const { return items.empty(); }
  void clear() {
    items.clear();
    tokens.clear();
    text.clear();
    pieces.clear();
    logprobs.clear();
    alternatives.clear();
    strings.clear();
  }
  void append(const Deltas &more) {
    const auto add = [](auto &to, const auto &from) { to.insert(to.end(), from.begin(), from.end()); };
    add(items, more.items);
    add(tokens, more.tokens);
    add(text, more.text);
    add(pieces, more.pieces);
    add(logprobs, more.logprobs);
    add(alternatives, more.alternatives);
    add(strings, more.strings);
  }
};

}  // namespace surogate::serve
