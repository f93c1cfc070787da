// Streamed answers on their way into sockets: a thread that writes, for all connections, what others hand it.
//
// A send into a socket costs the caller more than all that is done for a token before it, and a step of many streams
// brings one for each. So whoever makes the answers hands the bytes over, a copy and no call of the kernel's, and goes
// on with the next stream while this thread sends. It needs no GIL. Where there are only a few streams, to wake the
// thread would take longer than to send: then whoever hands them over sends.
//
// A stream's bytes leave in the order in which they were put. Bytes that wait for the thread together leave together.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "error.h"

namespace surogate::serve {

// For several threads at once, but one stream for one thread.
class SUROGATE_API ChunkWriter {
 public:
  struct Stream;

  ChunkWriter();
  ~ChunkWriter();
  ChunkWriter(const ChunkWriter &) = delete;
  ChunkWriter &operator=(const ChunkWriter &) = delete;

  // Begins to write into a socket, of which the stream has a descriptor of its own: that of the caller may be closed,
  // and its number be another connection's, while bytes are under way. To be closed at last. Throws where no descriptor
  // is left.
  std::shared_ptr<Stream> open(int socket);

  // Hands over `parts` as one chunk of HTTP/1.1's chunked coding, or nothing where they are empty: an empty chunk is
  // the body's end. False, and nothing was taken, where more than 64 KiB wait already because the other side takes
  // nothing, where the connection is gone, and once the stream is closed.
  bool put(const std::shared_ptr<Stream> &stream, std::span<const std::string_view> parts);

  // Ends the stream, and gives back what was not sent, which the caller may send on.
  std::string close(Stream &stream);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void work();
  void await_streams(Lock &lock);
  void retry_stuck();
  void send(const std::shared_ptr<Stream> &stream, Lock &lock);
  void call();

  std::mutex mutex_;
  std::condition_variable wake_, sent_;
  std::deque<std::shared_ptr<Stream>> ready_;   // with bytes that wait for the thread
  std::vector<std::shared_ptr<Stream>> stuck_;  // whose sockets took no more
  std::chrono::steady_clock::time_point retry_at_;  // of those
  std::atomic<bool> is_called_ = false;             // there is something for the thread to look at
  bool is_asleep_ = false, is_ending_ = false;
  int32_t open_ = 0;  // streams
  std::thread thread_;
};

}  // namespace surogate::serve
