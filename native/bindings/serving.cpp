#include "serving.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <vector>

#include "../engine/serve/loop.h"
#include "convert.h"
#include "serving_parts.h"
#include "session.h"

namespace surogate::python {
namespace {

using namespace serve;

// An object with fill(handles, rows) and accept(handles, tokens), called with the GIL. What it raises fails the choices
// that were asked about, one by one where there are several.
class PythonMasks : public MaskSource {
 public:
  explicit PythonMasks(nb::object source) : fill_(source.attr("fill")), accept_(source.attr("accept")) {}
  ~PythonMasks() override {
    nb::gil_scoped_acquire acquire;
    fill_.reset();
    accept_.reset();
  }

  void fill(std::span<const int64_t> handles, uint32_t *rows, int32_t words, std::span<uint8_t> failed) override {
    nb::gil_scoped_acquire acquire;
    if (try_fill(handles, rows, words)) return;
    for (size_t i = 0; i < handles.size(); ++i) {
      failed[i] = !try_fill(handles.subspan(i, 1), rows + i * static_cast<size_t>(words), words);
    }
  }

  void accept(std::span<const int64_t> handles, std::span<const int32_t> tokens, std::span<Verdict> verdicts) override {
    nb::gil_scoped_acquire acquire;
    if (try_accept(handles, tokens, verdicts) || handles.size() == 0) return;
    // Some of them may have gone on already, so there is nothing to be asked again.
    std::fill(verdicts.begin(), verdicts.end(), Verdict::kBroken);
  }

 private:
  static nb::list list_of(auto values) {
    nb::list list;
    for (auto value : values) list.append(value);
    return list;
  }

  bool try_fill(std::span<const int64_t> handles, uint32_t *rows, int32_t words) {
    try {
      const size_t shape[] = {handles.size(), static_cast<size_t>(words)};
      fill_(list_of(handles), nb::ndarray<nb::numpy, uint32_t>(rows, 2, shape, nb::none()).cast(nb::rv_policy::reference));
      return true;
    } catch (nb::python_error &error) {
      error.discard_as_unraisable("the grammars' fill");
      return false;
    }
  }

  // accept returns None, or for each handle 0 (goes on), 1 (complete) or -1 (broken).
  bool try_accept(std::span<const int64_t> handles, std::span<const int32_t> tokens, std::span<Verdict> verdicts) {
    try {
      const nb::object said = accept_(list_of(handles), list_of(tokens));
      if (said.is_none()) return true;
      size_t next = 0;
      for (nb::handle one : said) {
        if (next == verdicts.size()) break;
        const int value = nb::cast<int>(one);
        verdicts[next++] = value > 0 ? Verdict::kComplete : value < 0 ? Verdict::kBroken : Verdict::kGoesOn;
      }
      return next == verdicts.size();
    } catch (nb::python_error &error) {
      error.discard_as_unraisable("the grammars' accept");
      return false;
    } catch (const nb::cast_error &) {
      return false;
    }
  }

  nb::object fill_, accept_;
};

// The loop, and what it must not outlive. Its thread may wait for the GIL, so whoever waits for the thread lets go of it.
struct BoundLoop {
  std::vector<nb::object> sessions;
  std::unique_ptr<Loop> loop;
  Deltas taken;

  explicit BoundLoop(const LoopOptions &options) : loop(std::make_unique<Loop>(options)) {}
  ~BoundLoop() {
    nb::gil_scoped_release release;
    loop.reset();
  }
};

std::unique_ptr<BoundLoop> open_loop(int32_t places, int32_t num_blocks, int32_t block_size, int32_t context,
                                     int32_t token_budget, int32_t vocab, bool run_ahead, int32_t step_overhead,
                                     int32_t max_requests, nb::bytes hash_key, nb::bytes model_key) {
  LoopOptions options;
  options.scheduler = {places, num_blocks, block_size, token_budget, step_overhead};
  options.context = context;
  options.vocab = vocab;
  options.run_ahead = run_ahead;
  options.max_requests = max_requests;
  options.hash_key = HashKey::from(
      std::span(static_cast<const unsigned char *>(static_cast<const void *>(hash_key.c_str())), hash_key.size()));
  options.model_key.assign(model_key.c_str(), model_key.size());
  return std::make_unique<BoundLoop>(options);
}

void add_session(BoundLoop &self, nb::object session, int32_t tokens, int32_t rows, bool adapters, bool decode_only) {
  self.loop->add_session(session_of(session), {tokens, rows, adapters, decode_only});
  self.sessions.push_back(session);
}

void set_tokenizer(BoundLoop &self, nb::sequence tokens, nb::handle special, std::vector<int32_t> stop_tokens) {
  self.loop->set_texts({read_tokenizer(tokens, special), std::move(stop_tokens)});
}

template <class T>
void take(nb::dict fields, const char *name, T &field) {
  if (!fields.contains(name)) return;
  try {
    field = nb::cast<T>(fields[name]);
  } catch (const nb::cast_error &) {
    throw Error(std::string("request: ") + name + " is out of range or of another type");
  }
}

std::string bytes_in(nb::dict fields, const char *name) {
  if (!fields.contains(name)) return {};
  const nb::bytes bytes = nb::cast<nb::bytes>(fields[name]);
  return std::string(bytes.c_str(), bytes.size());
}

Generation generation_of(nb::dict fields) {
  Generation g;
  take(fields, "prompt", g.prompt);
  take(fields, "max_tokens", g.max_tokens);
  Sampling &s = g.sampling;
  take(fields, "temperature", s.temperature);
  take(fields, "top_k", s.top_k);
  take(fields, "top_p", s.top_p);
  take(fields, "min_p", s.min_p);
  take(fields, "presence_penalty", s.presence);
  take(fields, "frequency_penalty", s.frequency);
  take(fields, "repetition_penalty", s.repetition);
  take(fields, "seed", s.seed);
  take(fields, "logit_bias", s.bias);
  take(fields, "n", g.choices);
  take(fields, "stop", g.stop);
  take(fields, "stop_after", g.stop_after);
  take(fields, "include_stop", g.include_stop);
  take(fields, "special_text", g.special_text);
  take(fields, "stop_token_ids", g.stop_tokens);
  take(fields, "ignore_eos", g.ignore_eos);
  take(fields, "min_tokens", g.min_tokens);
  take(fields, "logprobs", g.logprobs);
  take(fields, "prompt_logprobs", g.prompt_logprobs);
  take(fields, "priority", g.priority);
  g.salt = bytes_in(fields, "cache_salt");
  take(fields, "adapter_slot", g.adapter_slot);
  g.adapter_key = bytes_in(fields, "adapter_key");
  take(fields, "grammars", g.grammars);
  take(fields, "thinking_budget", g.thinking_budget);
  take(fields, "thinking_end", g.thinking_end);
  take(fields, "opening", g.opening);
  return g;
}

// (id, None, None), or (None, reason, message).
nb::tuple submit(BoundLoop &self, nb::dict fields) {
  Generation generation = generation_of(fields);
  int64_t id = -1;
  Refusal refusal;
  {
    nb::gil_scoped_release release;
    refusal = self.loop->submit(std::move(generation), id);
  }
  if (refusal.reason == nullptr) return nb::make_tuple(id, nb::none(), nb::none());
  return nb::make_tuple(nb::none(), refusal.reason, refusal.message);
}

// Reads the lists of Deltas from their begin on.
class Reader {
 public:
  explicit Reader(const Deltas &deltas) : d_(deltas) {}

  nb::tuple row(const Deltas::Item &item) {
    static constexpr const char *kFinishes[kNumFinishes] = {nullptr, "stop", "length", "context", "cancelled", "error"};
    nb::list tokens, pieces;
    for (int32_t i = 0; i < item.tokens; ++i) tokens.append(d_.tokens[token_++]);
    const nb::str text(d_.text.data() + text_, item.text);
    for (int32_t i = 0; i < item.pieces; ++i) {
      const auto &[token, bytes] = d_.pieces[piece_++];
      pieces.append(nb::make_tuple(token, nb::str(d_.text.data() + text_, bytes)));
      text_ += bytes;
    }
    const nb::object prompt = logprobs(item.has_prompt_logprobs, item.prompt_logprobs);
    const nb::object sampled = logprobs(item.has_logprobs, item.logprobs);
    nb::object stop = nb::none(), error = nb::none(), finish = nb::none(), queued = nb::none();
    if (item.finish != Finish::kNone) finish = nb::str(kFinishes[static_cast<size_t>(item.finish)]);
    if (item.stop_token >= 0) stop = nb::int_(item.stop_token);
    if (item.has_stop_string) stop = nb::str(d_.strings[string_].data(), d_.strings[string_].size()), string_ += 1;
    if (item.has_error) error = nb::str(d_.strings[string_].data(), d_.strings[string_].size()), string_ += 1;
    if (item.queued_seconds >= 0) queued = nb::float_(item.queued_seconds);
    return nb::make_tuple(
        item.id, item.choice, tokens, text, pieces, sampled, prompt, item.cached_tokens, finish, stop, error, queued);
  }

 private:
  nb::object logprobs(bool wanted, int32_t count) {
    if (!wanted) return nb::none();
    nb::list list;
    for (int32_t i = 0; i < count; ++i) {
      const Deltas::Logprob &one = d_.logprobs[logprob_++];
      nb::list top;
      for (int32_t a = 0; a < one.alternatives; ++a) {
        const auto &[token, logprob] = d_.alternatives[alternative_++];
        top.append(nb::make_tuple(token, logprob));
      }
      nb::object logprob = nb::none();
      if (!std::isnan(one.logprob)) logprob = nb::float_(one.logprob);
      list.append(nb::make_tuple(one.token, logprob, nb::tuple(top)));
    }
    return list;
  }

  const Deltas &d_;
  size_t token_ = 0, piece_ = 0, logprob_ = 0, alternative_ = 0, string_ = 0;
  size_t text_ = 0;
};

nb::list poll(BoundLoop &self, double timeout) {
  Deltas taken;
  std::swap(taken, self.taken);  // its room is used again; two pollers have one each
  {
    nb::gil_scoped_release release;
    self.loop->poll(timeout, taken);
  }
  nb::list rows;
  Reader reader(taken);
  for (const Deltas::Item &item : taken.items) rows.append(reader.row(item));
  std::swap(taken, self.taken);
  return rows;
}

nb::dict stats(BoundLoop &self) {
  const Stats s = self.loop->stats();
  nb::dict blocks, finished, seconds, result;
  blocks["total"] = s.blocks.total;
  blocks["free"] = s.blocks.free;
  blocks["cached"] = s.blocks.cached;
  blocks["used"] = s.blocks.used;
  blocks["evictions"] = s.blocks.evictions;
  const char *reasons[kNumFinishes] = {nullptr, "stop", "length", "context", "cancelled", "error"};
  for (int i = 1; i < kNumFinishes; ++i) finished[reasons[i]] = s.finished[i];
  seconds["planning"] = s.planning_seconds;
  seconds["launching"] = s.launching_seconds;
  seconds["waiting"] = s.waiting_seconds;
  seconds["reading"] = s.reading_seconds;
  result["blocks"] = blocks;
  result["running"] = s.running;
  result["waiting"] = s.waiting;
  result["requests"] = s.requests;
  result["finished"] = finished;
  result["prompt_tokens"] = s.prompt_tokens;
  result["cached_tokens"] = s.cached_tokens;
  result["generated_tokens"] = s.generated_tokens;
  result["discarded_tokens"] = s.discarded_tokens;
  result["steps"] = s.steps;
  result["step_tokens"] = s.step_tokens;
  result["padded_tokens"] = s.padded_tokens;
  result["failures"] = s.failures;
  result["preemptions"] = s.preemptions;
  result["cache_queries"] = s.cache_queries;
  result["cache_hits"] = s.cache_hits;
  result["seconds"] = seconds;
  result["alive"] = s.alive;
  result["dead"] = s.dead.empty() ? nb::object(nb::none()) : nb::object(nb::str(s.dead.data(), s.dead.size()));
  return result;
}

}  // namespace

void bind_serving(nb::module_ &m) {
  nb::class_<BoundLoop>(m, "Loop")
      .def("add_session", &add_session, nb::arg("session"), nb::arg("tokens"), nb::arg("rows"), nb::arg("adapters"),
           nb::arg("decode_only"))
      .def("set_tokenizer", &set_tokenizer, nb::arg("tokens"), nb::arg("special"), nb::arg("stop_tokens"))
      .def("set_mask_source",
           [](BoundLoop &self, nb::object source) { self.loop->set_mask_source(std::make_shared<PythonMasks>(source)); })
      .def("start",
           [](BoundLoop &self) {
             nb::gil_scoped_release release;
             self.loop->start();
           })
      .def("context", [](const BoundLoop &self) { return self.loop->context(); })
      .def("submit", &submit, nb::arg("fields"))
      .def("cancel", [](BoundLoop &self, int64_t id, int32_t choice) { self.loop->cancel(id, choice); }, nb::arg("id"),
           nb::arg("choice") = -1)
      .def("poll", &poll, nb::arg("timeout"))
      .def("stats", &stats)
      .def("uses", [](const BoundLoop &self, int32_t slot) { return self.loop->uses(slot); })
      .def("drain",
           [](BoundLoop &self, double timeout) {
             nb::gil_scoped_release release;
             return self.loop->drain(timeout);
           })
      .def("stop", [](BoundLoop &self) {
        nb::gil_scoped_release release;
        self.loop->stop();
      });
  m.def("open_loop", &open_loop, nb::arg("places"), nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("context"),
        nb::arg("token_budget"), nb::arg("vocab"), nb::arg("run_ahead"), nb::arg("step_overhead"), nb::arg("max_requests"),
        nb::arg("hash_key"), nb::arg("model_key"));
}

}  // namespace surogate::python
