// What cache blocks and text cost the serving loop, natively: prints "name nanoseconds" lines. benchmarks/serve_parts.py
// compiles and runs it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>

#include "serve/blocks.h"
#include "serve/text.h"

using namespace surogate::serve;

namespace {

constexpr HashKey kKey{0x0706050403020100ull, 0x0f0e0d0c0b0a0908ull};
int repeats = 5;

// The least of `repeats` runs of `body`, which does `count` of what the line is about.
void report(const char *name, int64_t count, const std::function<void()> &body) {
  double least = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    least = std::min(least, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count());
  }
  std::printf("%s %.2f\n", name, least / static_cast<double>(count));
}

std::vector<int32_t> numbers(int32_t count, int32_t first) {
  std::vector<int32_t> result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

void blocks() {
  constexpr int32_t kBlocks = 8192, kLength = 512;  // blocks of a pool, and of a prompt of 8192 tokens
  BlockPool pool(kBlocks, 16, kKey);
  const std::vector<int32_t> tokens = numbers(kLength * 16, 7);
  std::vector<Hash128> chain;
  chain.reserve(kLength);
  report("block_name", kLength, [&] {
    chain.clear();
    pool.extend(chain, pool.root({}), tokens);
  });
  std::vector<int32_t> held(kLength);
  if (!pool.allocate(held)) std::abort();
  for (int32_t i = 0; i < kLength; ++i) pool.publish(held[i], chain[i]);
  pool.release(held);
  report("block_match_and_release", kLength, [&] {
    if (pool.match(chain, held) != kLength) std::abort();
    pool.release(held);
  });
  std::vector<Hash128> fresh;
  int32_t round = 0;
  const auto fill = [&] {
    fresh.clear();
    pool.extend(fresh, {static_cast<uint64_t>(++round), 0}, tokens);
    if (!pool.allocate(held)) std::abort();
    for (int32_t i = 0; i < kLength; ++i) pool.publish(held[i], fresh[i]);
    pool.release(held);
  };
  while (pool.stats().free > 0) fill();
  report("block_evict_name_publish_and_release", kLength, fill);
}

void text() {
  // Words of four bytes, an accent in every eighth.
  std::string bytes;
  std::vector<uint64_t> offsets{0};
  constexpr int32_t kVocab = 4096, kTokens = 100000;
  for (int32_t i = 0; i < kVocab; ++i) {
    bytes += i % 8 == 0 ? " n\xC3\xA9" : " wor";
    bytes.back() = static_cast<char>(i % 8 == 0 ? bytes.back() : 'a' + i % 26);
    offsets.push_back(bytes.size());
  }
  const auto tokenizer = std::make_shared<const Tokenizer>(bytes, offsets, std::vector<uint8_t>(kVocab));
  const auto run = [&](const std::shared_ptr<const StopStrings> &stops) {
    TextStream stream(tokenizer, stops, {});
    Pieces out;
    for (int32_t i = 0; i < kTokens; ++i) {
      out.clear();
      if (stream.feed(i % kVocab, out)) std::abort();
    }
  };
  report("text_token", kTokens, [&] { run(nullptr); });
  const auto stops = std::make_shared<const StopStrings>(
      std::vector<std::string>{"\nUser:", "\n\n", "</answer>", " wok wok"});
  report("text_token_with_4_stop_strings", kTokens, [&] { run(stops); });
}

}  // namespace

int main(int count, char **arguments) {
  if (count > 1) repeats = std::max(1, std::atoi(arguments[1]));
  blocks();
  text();
  return 0;
}
