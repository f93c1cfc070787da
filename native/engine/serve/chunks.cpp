#include "serve/chunks.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

namespace surogate::serve {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMostWaiting = 64 << 10;
constexpr int32_t kFewStreams = 8;  // which are not worth the thread's being woken
// The next stream's bytes mostly come within some microseconds, and to wake a thread costs whoever does it as many.
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr auto kRetry = std::chrono::milliseconds(5);  // of sockets that took no more

// How many bytes the socket took: 0 where it takes none now, -1 where it never will again.
ssize_t send_some(int socket, const std::string &bytes) {
  ssize_t sent;
  do {
    sent = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : sent;
}

}  // namespace

struct ChunkWriter::Stream {
  int socket = -1;               // -1: closed
  std::string waiting, sending;  // `sending`: while is_sent, read without the lock
  bool is_ready = false;         // in ready_
  bool is_stuck = false;         // in stuck_
  bool is_sent = false;          // by some thread, just now
  bool is_broken = false;        // the connection is gone, and what waited was dropped
};

ChunkWriter::ChunkWriter() : thread_([this] { work(); }) {}

ChunkWriter::~ChunkWriter() {
  {
    const Lock lock(mutex_);
    is_ending_ = true;
    call();
  }
  thread_.join();
}

std::shared_ptr<ChunkWriter::Stream> ChunkWriter::open(int socket) {
  const int own = ::fcntl(socket, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw Error(std::string("no descriptor for a stream: ") + std::strerror(errno));
  auto stream = std::make_shared<Stream>();
  stream->socket = own;
  const Lock lock(mutex_);
  open_ += 1;
  return stream;
}

bool ChunkWriter::put(const std::shared_ptr<Stream> &stream, std::span<const std::string_view> parts) {
  size_t size = 0;
  for (const std::string_view part : parts) size += part.size();
  char head[24];
  const int head_size = std::snprintf(head, sizeof(head), "%zx\r\n", size);
  Lock lock(mutex_);
  std::string &waiting = stream->waiting;
  const size_t held = waiting.size() + (stream->is_sent ? stream->sending.size() : 0);
  if (stream->socket < 0 || stream->is_broken || held > kMostWaiting) return false;
  if (size == 0) return true;
  waiting.append(head, static_cast<size_t>(head_size));
  for (const std::string_view part : parts) waiting.append(part);
  waiting.append("\r\n");
  if (stream->is_ready) return true;
  if (open_ <= kFewStreams && !stream->is_sent) {
    send(stream, lock);
    return true;
  }
  stream->is_ready = true;
  ready_.push_back(stream);
  call();
  return true;
}

std::string ChunkWriter::close(Stream &stream) {
  Lock lock(mutex_);
  sent_.wait(lock, [&] { return !stream.is_sent; });
  if (stream.socket < 0) return {};
  ::close(std::exchange(stream.socket, -1));
  open_ -= 1;
  return std::exchange(stream.waiting, {});
}

// With the lock.
void ChunkWriter::call() {
  is_called_.store(true, std::memory_order_release);
  if (is_asleep_) wake_.notify_one();
}

// All that waits of a stream, as far as its socket takes it.
void ChunkWriter::send(const std::shared_ptr<Stream> &stream, Lock &lock) {
  std::string &bytes = stream->sending;
  bytes.clear();
  bytes.swap(stream->waiting);
  stream->is_sent = true;
  lock.unlock();
  const ssize_t sent = send_some(stream->socket, bytes);
  lock.lock();
  stream->is_sent = false;
  sent_.notify_all();
  if (sent < 0) {
    stream->is_broken = true;
    stream->waiting.clear();
  } else if (static_cast<size_t>(sent) < bytes.size()) {
    stream->waiting.insert(0, bytes, static_cast<size_t>(sent));
    if (std::exchange(stream->is_stuck, true)) return;
    if (stuck_.empty()) retry_at_ = Clock::now() + kRetry;
    stuck_.push_back(stream);
    call();
  }
}

void ChunkWriter::retry_stuck() {
  for (const std::shared_ptr<Stream> &stream : std::exchange(stuck_, {})) {
    stream->is_stuck = false;
    if (stream->waiting.empty() || std::exchange(stream->is_ready, true)) continue;
    ready_.push_back(stream);
  }
}

// Until there may be a stream that is ready, or the end.
void ChunkWriter::await_streams(Lock &lock) {
  is_called_ = false;
  lock.unlock();
  const auto end = Clock::now() + kSpin;
  while (!is_called_.load(std::memory_order_acquire) && Clock::now() < end) std::this_thread::yield();
  lock.lock();
  const auto is_called = [&] { return is_called_.load(); };
  is_asleep_ = true;
  if (stuck_.empty()) {
    wake_.wait(lock, is_called);
  } else {
    wake_.wait_until(lock, retry_at_, is_called);
  }
  is_asleep_ = false;
  if (!stuck_.empty() && Clock::now() >= retry_at_) retry_stuck();
}

void ChunkWriter::work() {
  Lock lock(mutex_);
  while (!is_ending_) {
    if (ready_.empty()) {
      await_streams(lock);
      continue;
    }
    const std::shared_ptr<Stream> stream = std::move(ready_.front());
    ready_.pop_front();
    stream->is_ready = false;
    if (!stream->waiting.empty() && !stream->is_sent) send(stream, lock);
  }
}

}  // namespace surogate::serve
