// Steps become runs: the inputs of a program are filled, its entries put on the queue, and what was sampled comes back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "serve/readback.h"
#include "serve/step.h"
#include "session.h"

namespace surogate::serve {

constexpr int32_t kMaxAlternatives = 20;
// Of a row's `draw`: what is to be done with its logits.
constexpr int32_t kMasked = 1, kBiased = 2, kPenalised = 4;

// What a step came to, one for each row; log-probabilities where the step has them.
struct Results {
  const int32_t *sampled = nullptr;
  const float *logprobs = nullptr;
  const int32_t *top_ids = nullptr;  // kMaxAlternatives a row
  const float *top_logprobs = nullptr;
};

class SUROGATE_API Runner {
 public:
  Runner(int32_t places, int32_t block_size, int32_t vocab);

  // A program whose tensors and entries are those of surogate_core/model/serving.py. It stays open as long as this.
  // Throws Error where something is missing or has another shape, or where it is bound to other state than the first one.
  void add(Session &session, Bucket bucket);
  const Buckets &buckets() const { return buckets_; }
  const std::shared_ptr<Queue> &queue() const { return queue_; }
  bool is_host() const { return queue_->device()->is_host(); }
  int32_t table_width() const { return table_width_; }  // blocks that a sequence can have

  std::unique_ptr<Readback> make_readback() const;  // with room for any step's results

  // The mask of a row of the step that is launched next: bit v % 32 of word v / 32 allows v. To be filled by the caller.
  std::span<uint32_t> mask(int32_t row);
  void drop_masks();  // of a step that is not launched after all
  int32_t mask_words() const { return mask_words_; }
  int32_t vocab() const { return vocab_; }

  // Runs every entry of every program on nothing but padding, as often as a device needs to have it recorded: the first
  // requests need not wait for that. Nothing is written that somebody reads. Throws Error.
  void warm_up();

  // Throws Error; then nothing of the step counts.
  void launch(const Step &step, Readback &readback);
  Results wait(const Step &step, Readback &readback);

 private:
  struct Upload {
    char *to;
    const char *from;
    uint64_t bytes;
  };
  struct Program {
    Session *session;
    Bucket bucket;
    // Where the host writes its inputs: on the host the program's memory, on a device a copy of it.
    std::vector<char> staging;
    std::vector<Upload> uploads;
    int32_t *tokens, *positions, *sequence_ids, *slots, *rows, *row_places, *draw, *adapter_slots = nullptr;
    float *sampling;
    char *mask;
    const void *sampled, *logprobs, *top_ids, *top_logprobs;
  };

  void bind_state(Session &session);
  void bind_inputs(Program &program);
  void fill(Program &program, const Step &step);
  int32_t fill_tokens(Program &program, const Chunk &chunk, int32_t first);
  void fill_rows(Program &program, const Chunk &chunk, int32_t first);
  void pad(Program &program, const Step &step);
  void write_state(const Step &step);
  void write_tables(const Step &step);
  void write_counts(Sequence &sequence);
  void write_bias(Sequence &sequence);
  void write_masks(Program &program);

  int32_t places_, block_size_, vocab_, mask_words_;
  std::shared_ptr<Queue> queue_;
  Buckets buckets_;
  std::vector<Program> programs_;  // parallel to buckets_
  int32_t table_width_ = 0, max_rows_ = 0;
  char *tables_on_device_ = nullptr, *counts_on_device_ = nullptr, *bias_on_device_ = nullptr;
  std::vector<int32_t> tables_, counts_;  // of all places; of one
  std::vector<float> bias_;               // of one place
  std::vector<uint32_t> masks_;
  std::vector<uint8_t> masked_;           // for each row
};

}  // namespace surogate::serve
