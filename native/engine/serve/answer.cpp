#include "serve/answer.h"

#include <algorithm>
#include <limits>

namespace surogate::serve {

bool Texts::stops(int32_t token) const { return std::binary_search(stop_tokens.begin(), stop_tokens.end(), token); }

void Answers::begin(Group &group) const {
  const Generation &request = group.request;
  std::shared_ptr<const StopStrings> stops;
  if (!request.stop.empty()) stops = std::make_shared<const StopStrings>(request.stop);
  const TextOptions options{request.include_stop, request.special_text, request.stop_after, request.opening};
  for (Sequence &sequence : group.sequences) {
    sequence.text = std::make_unique<TextStream>(texts.tokenizer, stops, options);
  }
}

// The last item, if it is this choice's: its lists end where all lists end.
Deltas::Item &Answers::item(const Sequence &sequence) {
  const Group &group = *sequence.group;
  if (deltas.items.empty() || deltas.items.back().id != group.id || deltas.items.back().choice != sequence.choice) {
    deltas.items.push_back({group.id, sequence.choice});
    deltas.items.back().cached_tokens = std::max(group.cached_tokens, 0);
    deltas.items.back().queued_seconds = group.queued_seconds;
    deltas.items.back().has_logprobs = group.request.logprobs >= 0;
  }
  return deltas.items.back();
}

void Answers::add_text(Deltas::Item &to) {
  deltas.text += pieces_.text;
  to.text += static_cast<uint32_t>(pieces_.text.size());
  uint32_t begin = 0;
  for (const Pieces::Piece &piece : pieces_.pieces) {
    deltas.pieces.emplace_back(piece.token, piece.end - begin);
    begin = piece.end;
  }
  to.pieces += static_cast<int32_t>(pieces_.pieces.size());
  pieces_.clear();
}

Finish Answers::take(Sequence &s, int32_t token, const TokenRow &row, Verdict verdict, bool forced) {
  const Generation &request = s.group->request;
  Deltas::Item &to = item(s);
  s.tokens.push_back(token);
  deltas.tokens.push_back(token);
  to.tokens += 1;
  if (request.logprobs >= 0) {
    const int32_t alternatives = row.logprob == nullptr ? 0 : request.logprobs;
    deltas.logprobs.push_back({token, row.logprob == nullptr ? 0.0f : *row.logprob, alternatives});
    for (int32_t i = 0; i < alternatives; ++i) deltas.alternatives.emplace_back(row.top_ids[i], row.top_logprobs[i]);
    to.logprobs += 1;
  }
  const bool own = texts.stops(token);
  const bool asked = std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end();
  const bool ends = !forced && ((own && !request.ignore_eos) || asked);
  const bool string_ends = s.text->feed(token, pieces_, !ends);
  add_text(to);
  follow_thinking(s);
  if (ends) {
    to.stop_token = own ? -1 : token;
    finish(to, s, Finish::kStop);
  } else if (string_ends || verdict == Verdict::kComplete) {
    finish(to, s, Finish::kStop);
  } else if (verdict == Verdict::kBroken) {
    end(s, Finish::kError, "the grammar does not allow a token that was chosen by it");
  } else if (s.known() >= s.group->limit) {
    finish(to, s, s.group->limit_finish);
  }
  return deltas.items.back().finish;
}

void Answers::follow_thinking(Sequence &s) const {
  const std::vector<int32_t> &end = s.group->request.thinking_end;
  if (s.thinking_over || end.empty()) return;
  const size_t answered = s.tokens.size() - s.group->request.prompt.size();
  const int32_t opening = s.group->request.opening;
  if (answered == 1 && opening >= 0 && s.tokens.back() != opening) {
    s.thinking_over = true;
    return;
  }
  s.thinking_over = answered >= end.size() && std::equal(end.rbegin(), end.rend(), s.tokens.rbegin());
}

std::span<const int32_t> Answers::forced(const Sequence &s) const {
  const Generation &request = s.group->request;
  const bool due = request.thinking_budget >= 0 && !s.thinking_over && !s.finished && s.known() < s.group->limit &&
                   s.known() - s.group->prompt_tokens() == request.thinking_budget + (request.opening >= 0 ? 1 : 0);
  return due ? std::span<const int32_t>(request.thinking_end) : std::span<const int32_t>();
}

void Answers::finish(Deltas::Item &to, Sequence &s, Finish finish) {
  if (s.text->stop() < 0 && s.text->finish(pieces_)) finish = Finish::kStop;  // the last character completed a stop string
  add_text(to);
  if (const int32_t stop = s.text->stop(); stop >= 0) {
    to.has_stop_string = true;
    deltas.strings.push_back(s.group->request.stop[static_cast<size_t>(stop)]);
  }
  to.finish = finish;
  s.finished = true;
  s.epoch += 1;
}

void Answers::end(Sequence &s, Finish how, const std::string &error) {
  Deltas::Item &to = item(s);
  finish(to, s, how);
  if (how != Finish::kError) return;
  to.finish = Finish::kError;
  to.has_error = true;
  deltas.strings.push_back(error);
}

void Answers::tell_prompt(const Sequence &s) {
  Group &group = *s.group;
  Deltas::Item &to = item(s);
  const int32_t alternatives = std::max(group.request.logprobs, 0);
  to.has_prompt_logprobs = true;
  to.prompt_logprobs = group.prompt_tokens();
  deltas.logprobs.push_back({group.request.prompt[0], std::numeric_limits<float>::quiet_NaN(), 0});
  for (size_t i = 0; i < group.prompt_logprobs.size(); ++i) {
    deltas.logprobs.push_back({group.request.prompt[i + 1], group.prompt_logprobs[i], alternatives});
  }
  deltas.alternatives.insert(deltas.alternatives.end(), group.prompt_top.begin(), group.prompt_top.end());
}

void Answers::forbid_stops(const Generation &request, std::span<uint32_t> mask) {
  forbidden_.clear();
  const auto forbid = [&](int32_t token) {
    const size_t word = static_cast<size_t>(token) / 32;
    const uint32_t bit = 1u << (token % 32);
    if (token < 0 || word >= mask.size() || (mask[word] & bit) == 0) return;
    mask[word] &= ~bit;
    forbidden_.push_back(token);
  };
  if (!request.ignore_eos) std::for_each(texts.stop_tokens.begin(), texts.stop_tokens.end(), forbid);
  std::for_each(request.stop_tokens.begin(), request.stop_tokens.end(), forbid);
  if (std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; })) return;
  for (int32_t token : forbidden_) mask[static_cast<size_t>(token) / 32] |= 1u << (token % 32);
}

}  // namespace surogate::serve
