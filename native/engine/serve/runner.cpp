#include "serve/runner.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "dtype.h"

namespace surogate::serve {
namespace {

constexpr int32_t kSamplingColumns = 8, kDrawColumns = 8;
constexpr size_t kManyTables = 8;    // rows of the block table that are not worth a copy each
constexpr uint64_t kGap = 256;       // bytes between two inputs that are copied along with them

// The memory of a tensor that must have this type and shape.
char *place_of(const Session &session, const std::string &name, int32_t dtype, std::vector<int64_t> shape) {
  const sg_tensor &tensor = session.tensor(name);
  bool fits = tensor.dtype == dtype && tensor.rank == static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t axis = shape.size(); fits && axis-- > 0;) {
    fits = tensor.shape[axis] == shape[axis] && (tensor.shape[axis] == 1 || tensor.strides[axis] == stride);
    stride *= shape[axis];
  }
  if (!fits) {
    std::string wanted;
    for (int64_t size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    throw Error("serving: tensor '" + name + "' of a program must be dense " + dtype_info(dtype)->name + " [" + wanted + "]",
                "the programs, the places and the vocabulary that a loop is given must be of one model");
  }
  return static_cast<char *>(tensor.data);
}


}  // namespace

Runner::Runner(int32_t places, int32_t block_size, int32_t vocab)
    : places_(places), block_size_(block_size), vocab_(vocab), mask_words_((vocab + 31) / 32) {
  if (vocab < 1) throw Error("a loop needs a vocabulary");
}

void Runner::bind_state(Session &session) {
  const int64_t places = places_, vocab = vocab_;
  place_of(session, "last_ids", SG_I32, {places});
  const sg_tensor &tables = session.tensor("block_tables");
  const int64_t width = tables.rank == 2 ? tables.shape[1] : 0;
  char *on_device = place_of(session, "block_tables", SG_I32, {places, width});
  char *counts = place_of(session, "counts", SG_I32, {places, vocab});
  char *bias = place_of(session, "bias", SG_F32, {places, vocab});
  if (queue_ == nullptr) {
    queue_ = session.queue();
    tables_on_device_ = on_device;
    counts_on_device_ = counts;
    bias_on_device_ = bias;
    table_width_ = static_cast<int32_t>(width);
    tables_.resize(static_cast<size_t>(places * width));
    counts_.resize(static_cast<size_t>(vocab));
    bias_.resize(static_cast<size_t>(vocab));
  }
  if (session.queue() != queue_) throw Error("serving: a program is on another queue than the first", "open all on one queue");
  if (on_device != tables_on_device_ || counts != counts_on_device_ || bias != bias_on_device_) {
    throw Error("serving: a program's block_tables, counts or bias are not the first one's", "bind all to the same memory");
  }
}

void Runner::add(Session &session, Bucket bucket) {
  bind_state(session);
  for (const char *entry : {"forward", "sample", "sample_full", "logprobs"}) session.entry(entry);
  Program program{};
  program.session = &session;
  program.bucket = bucket;
  bind_inputs(program);
  const int64_t rows = bucket.rows;
  program.sampled = place_of(session, "sampled", SG_I32, {rows});
  program.logprobs = place_of(session, "logprob", SG_F32, {rows});
  program.top_ids = place_of(session, "top_ids", SG_I32, {rows, kMaxAlternatives});
  program.top_logprobs = place_of(session, "top_logprobs", SG_F32, {rows, kMaxAlternatives});
  programs_.push_back(std::move(program));
  buckets_.add(bucket);
  max_rows_ = std::max(max_rows_, bucket.rows);
  masks_.resize(static_cast<size_t>(max_rows_) * static_cast<size_t>(mask_words_));
  masked_.resize(static_cast<size_t>(max_rows_));
}

void Runner::bind_inputs(Program &program) {
  const Session &session = *program.session;
  const int64_t tokens = program.bucket.tokens, rows = program.bucket.rows;
  struct Input {
    const char *name;
    int32_t dtype;
    std::vector<int64_t> shape;
    void *field;  // T **
    char *place = nullptr;
  };
  std::vector<Input> inputs = {{"tokens", SG_I32, {tokens}, &program.tokens},
                               {"positions", SG_I32, {tokens}, &program.positions},
                               {"sequence_ids", SG_I32, {tokens}, &program.sequence_ids},
                               {"slots", SG_I32, {tokens}, &program.slots},
                               {"rows", SG_I32, {rows}, &program.rows},
                               {"row_places", SG_I32, {rows}, &program.row_places},
                               {"sampling", SG_F32, {rows, kSamplingColumns}, &program.sampling},
                               {"draw", SG_I32, {rows, kDrawColumns}, &program.draw}};
  if (program.bucket.adapters) inputs.push_back({"adapter_slots", SG_I32, {tokens}, &program.adapter_slots});
  uint64_t total = 0;
  const auto bytes_of = [&](const Input &input) { return session.tensor_record(input.name).bytes; };
  for (Input &input : inputs) {
    input.place = place_of(session, input.name, input.dtype, input.shape);
    total += bytes_of(input) + kGap;
  }
  program.mask = place_of(session, "mask", SG_I32, {rows, mask_words_});
  const auto set = [](const Input &input, char *place) { std::memcpy(input.field, &place, sizeof(place)); };
  if (is_host()) {
    for (const Input &input : inputs) set(input, input.place);
    return;
  }
  // Neighbours in memory are copied at once.
  std::sort(inputs.begin(), inputs.end(), [](const Input &a, const Input &b) { return a.place < b.place; });
  program.staging.resize(total);
  char *next = program.staging.data();
  for (const Input &input : inputs) {
    Upload *last = program.uploads.empty() ? nullptr : &program.uploads.back();
    if (last != nullptr && static_cast<uint64_t>(input.place - last->to) < last->bytes + kGap) {
      next += static_cast<uint64_t>(input.place - last->to) - last->bytes;
      last->bytes = static_cast<uint64_t>(input.place - last->to) + bytes_of(input);
    } else {
      program.uploads.push_back({input.place, next, bytes_of(input)});
    }
    set(input, next);
    next += bytes_of(input);
  }
}

std::unique_ptr<Readback> Runner::make_readback() const {
  const uint64_t row = sizeof(int32_t) * (2 + 2 * kMaxAlternatives);
  return std::make_unique<Readback>(queue_, static_cast<uint64_t>(max_rows_) * row + 4 * 64);
}

std::span<uint32_t> Runner::mask(int32_t row) {
  masked_[static_cast<size_t>(row)] = 1;
  const size_t words = static_cast<size_t>(mask_words_);
  return std::span(masks_).subspan(static_cast<size_t>(row) * words, words);
}

void Runner::launch(const Step &step, Readback &readback) {
  Program &program = programs_[static_cast<size_t>(step.bucket)];
  fill(program, step);
  {
    std::lock_guard lock(queue_->mutex());
    write_state(step);
    for (const Upload &upload : program.uploads) queue_->write(upload.to, upload.from, upload.bytes);
    write_masks(program);
  }
  program.session->run("forward");
  Readback::Part parts[4];
  size_t count = 0;
  const uint64_t rows = static_cast<uint64_t>(step.rows) * sizeof(int32_t);
  if (step.rows > 0) {
    program.session->run(step.full ? "sample_full" : "sample");
    parts[count++] = {program.sampled, rows};
  }
  if (step.logprobs) {
    program.session->run("logprobs");
    parts[count++] = {program.logprobs, rows};
    parts[count++] = {program.top_ids, rows * kMaxAlternatives};
    parts[count++] = {program.top_logprobs, rows * kMaxAlternatives};
  }
  readback.begin(std::span(parts, count));
}

void Runner::warm_up() {
  constexpr int kRunsUntilRecorded = 2;
  const Step nothing;
  for (Program &program : programs_) {
    pad(program, nothing);
    {
      std::lock_guard lock(queue_->mutex());
      for (const Upload &upload : program.uploads) queue_->write(upload.to, upload.from, upload.bytes);
    }
    for (const char *entry : {"forward", "sample", "sample_full", "logprobs"}) {
      for (int run = 0; run < kRunsUntilRecorded; ++run) program.session->run(entry);
    }
  }
  queue_->synchronize();
}

Results Runner::wait(const Step &step, Readback &readback) {
  readback.wait();
  Results results;
  if (step.rows > 0) results.sampled = static_cast<const int32_t *>(readback.part(0));
  if (step.logprobs) {
    results.logprobs = static_cast<const float *>(readback.part(1));
    results.top_ids = static_cast<const int32_t *>(readback.part(2));
    results.top_logprobs = static_cast<const float *>(readback.part(3));
  }
  return results;
}

// ---- inputs

void Runner::fill(Program &program, const Step &step) {
  int32_t first = 0;
  for (const Chunk &chunk : step.chunks) {
    fill_rows(program, chunk, first);
    first = fill_tokens(program, chunk, first);
  }
  pad(program, step);
}

// A sequence's tokens from token `first` of the step on. Returns where the next one's begin.
int32_t Runner::fill_tokens(Program &program, const Chunk &chunk, int32_t first) {
  const Sequence &s = *chunk.sequence;
  const int32_t adapter = s.group->request.adapter_slot;
  for (int32_t i = 0; i < chunk.count; ++i) {
    const int32_t index = chunk.first + i, t = first + i;
    // What was sampled by the step before is on the device, under the sequence's place.
    program.tokens[t] = index < s.known() ? s.tokens[static_cast<size_t>(index)] : -1;
    program.positions[t] = index;
    program.sequence_ids[t] = s.place;
    program.slots[t] = s.blocks[static_cast<size_t>(index / block_size_)] * block_size_ + index % block_size_;
    if (program.adapter_slots != nullptr) program.adapter_slots[t] = adapter;
  }
  return first + chunk.count;
}

void Runner::fill_rows(Program &program, const Chunk &chunk, int32_t first) {
  const Sequence &s = *chunk.sequence;
  const Generation &request = s.group->request;
  for (int32_t i = 0; i < chunk.rows(); ++i) {
    const bool sampled = i >= chunk.prompt_rows;
    const int32_t row = chunk.row + i, token = sampled ? chunk.count - 1 : i;
    program.rows[row] = first + token;
    program.row_places[row] = sampled ? s.place : -1;
    float *sampling = program.sampling + int64_t{row} * kSamplingColumns;
    int32_t *draw = program.draw + int64_t{row} * kDrawColumns;
    std::fill_n(sampling, kSamplingColumns, 0.0f);
    std::fill_n(draw, kDrawColumns, 0);
    draw[6] = sampled ? request.logprobs : std::max(request.logprobs, 0);
    draw[7] = sampled ? -1 : request.prompt[static_cast<size_t>(chunk.first + token + 1)];
    if (!sampled) continue;
    const Sampling &how = request.sampling;
    const float columns[] = {how.temperature, how.top_p, how.min_p, how.presence, how.frequency, how.repetition};
    std::copy(std::begin(columns), std::end(columns), sampling);
    draw[0] = static_cast<int32_t>(static_cast<uint32_t>(how.seed));
    draw[1] = static_cast<int32_t>(static_cast<uint32_t>(how.seed >> 32));
    draw[2] = chunk.first + chunk.count;
    draw[3] = s.choice;
    draw[4] = how.top_k;
    draw[5] = (masked_[static_cast<size_t>(row)] ? kMasked : 0) | (how.bias.empty() ? 0 : kBiased) |
              (how.penalises() ? kPenalised : 0);
  }
}

void Runner::pad(Program &program, const Step &step) {
  const size_t tokens = static_cast<size_t>(program.bucket.tokens - step.tokens);
  const size_t rows = static_cast<size_t>(program.bucket.rows - step.rows);
  std::fill_n(program.tokens + step.tokens, tokens, 0);
  std::fill_n(program.positions + step.tokens, tokens, 0);
  std::fill_n(program.sequence_ids + step.tokens, tokens, -1);
  std::fill_n(program.slots + step.tokens, tokens, -1);
  if (program.adapter_slots != nullptr) std::fill_n(program.adapter_slots + step.tokens, tokens, -1);
  std::fill_n(program.rows + step.rows, rows, 0);
  std::fill_n(program.row_places + step.rows, rows, -1);
  std::fill_n(program.sampling + int64_t{step.rows} * kSamplingColumns, rows * kSamplingColumns, 0.0f);
  int32_t *draw = program.draw + int64_t{step.rows} * kDrawColumns;
  std::fill_n(draw, rows * kDrawColumns, 0);
  for (size_t row = 0; row < rows; ++row) draw[row * kDrawColumns + 6] = draw[row * kDrawColumns + 7] = -1;
}

void Runner::write_masks(Program &program) {
  const auto first = std::find(masked_.begin(), masked_.end(), 1);
  if (first == masked_.end()) return;
  const auto last = std::find(masked_.rbegin(), masked_.rend(), 1).base();
  const size_t row = static_cast<size_t>(first - masked_.begin()) * static_cast<size_t>(mask_words_);
  const size_t words = static_cast<size_t>(last - first) * static_cast<size_t>(mask_words_);
  queue_->write(program.mask + row * sizeof(uint32_t), masks_.data() + row, words * sizeof(uint32_t));
  drop_masks();
}

void Runner::drop_masks() { std::fill(masked_.begin(), masked_.end(), uint8_t{0}); }

// ---- what stays on the device from step to step

void Runner::write_state(const Step &step) {
  write_tables(step);
  for (const Chunk &chunk : step.chunks) {
    Sequence &s = *chunk.sequence;
    if (!chunk.samples) continue;
    if (s.group->request.sampling.penalises() && !s.counts_written) write_counts(s);
    if (!s.group->request.sampling.bias.empty() && !s.bias_written) write_bias(s);
  }
}

void Runner::write_tables(const Step &step) {
  size_t changed = 0;
  int32_t lowest = places_, highest = -1;
  const auto is_old = [](const Sequence &s) { return s.table_written == static_cast<int32_t>(s.blocks.size()); };
  for (const Chunk &chunk : step.chunks) {
    const Sequence &s = *chunk.sequence;
    if (is_old(s)) continue;
    std::copy(s.blocks.begin() + s.table_written, s.blocks.end(),
              tables_.begin() + int64_t{s.place} * table_width_ + s.table_written);
    changed += 1;
    lowest = std::min(lowest, s.place);
    highest = std::max(highest, s.place);
  }
  const auto write = [&](int64_t first, int64_t count) {
    queue_->write(tables_on_device_ + first * static_cast<int64_t>(sizeof(int32_t)), tables_.data() + first,
                  static_cast<uint64_t>(count) * sizeof(int32_t));
  };
  if (changed > kManyTables) write(int64_t{lowest} * table_width_, int64_t{highest - lowest + 1} * table_width_);
  for (const Chunk &chunk : step.chunks) {
    Sequence &s = *chunk.sequence;
    if (is_old(s)) continue;
    const int32_t size = static_cast<int32_t>(s.blocks.size());
    if (changed <= kManyTables) write(int64_t{s.place} * table_width_ + s.table_written, size - s.table_written);
    s.table_written = size;
  }
}

// How often each token is in the answer, and whether it is in the prompt. From here on the device counts.
void Runner::write_counts(Sequence &s) {
  constexpr int32_t kInPrompt = 1 << 30;
  std::fill(counts_.begin(), counts_.end(), 0);
  const size_t prompt = s.group->request.prompt.size();
  for (size_t i = 0; i < s.tokens.size(); ++i) {
    int32_t &count = counts_[static_cast<size_t>(s.tokens[i])];
    count = i < prompt ? count | kInPrompt : count + 1;
  }
  const uint64_t bytes = counts_.size() * sizeof(int32_t);
  queue_->write(counts_on_device_ + static_cast<uint64_t>(s.place) * bytes, counts_.data(), bytes);
  s.counts_written = true;
}

void Runner::write_bias(Sequence &s) {
  std::fill(bias_.begin(), bias_.end(), 0.0f);
  for (const auto &[token, bias] : s.group->request.sampling.bias) bias_[static_cast<size_t>(token)] += bias;
  const uint64_t bytes = bias_.size() * sizeof(float);
  queue_->write(bias_on_device_ + static_cast<uint64_t>(s.place) * bytes, bias_.data(), bytes);
  s.bias_written = true;
}

}  // namespace surogate::serve
