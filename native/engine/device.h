// Devices: the host, and what kernel libraries bring as backends. Thin owners of memory, streams, events and graphs, whose
// functions throw Error where the C table reports one.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

class Staging;
class Stream;

class SUROGATE_API Device : public std::enable_shared_from_this<Device> {
 public:
  // One object a device of the process. "cpu" is the host, and so is a backend that brings kernels but no memory. Throws
  // Error for a backend that no library brought, and for an index that it does not have.
  static std::shared_ptr<Device> open(const std::string &backend, int32_t index);
  ~Device();
  Device(const Device &) = delete;
  Device &operator=(const Device &) = delete;

  const std::string &backend() const { return backend_; }
  int32_t index() const { return index_; }
  bool is_host() const { return table_ == nullptr; }
  sg_device_info info() const;  // asked anew; not for the host

  void activate() const;  // for the calling thread; every other function below does it
  void *allocate(uint64_t bytes, int32_t kind, const std::string &what) const;
  void release(void *data, int32_t kind) const;
  void copy(void *to, const void *from, uint64_t bytes, void *stream) const;
  void clear(void *data, uint64_t bytes, void *stream) const;
  void synchronize(void *stream) const;

  // Copies between the host and this device. `upload` has taken what it needs of `from` when it returns, and what is put
  // on the stream later sees it; `download` returns when `to` is filled, after what was on the stream before.
  void upload(void *to, const void *from, uint64_t bytes, const Stream &stream);
  void download(void *to, const void *from, uint64_t bytes, const Stream &stream);

 private:
  friend class Stream;
  friend class Event;
  friend class Graph;
  Device(std::string backend, const sg_backend *table, int32_t index);
  // Throws what a function of the table reported.
  template <class Function, class... Args>
  void call(Function function, Args... args) const;

  std::string backend_;
  const sg_backend *table_;
  int32_t index_;
  std::mutex staging_mutex_;
  std::unique_ptr<Staging> staging_;  // made at the first copy
};

class SUROGATE_API Stream {
 public:
  explicit Stream(std::shared_ptr<const Device> device);
  ~Stream();
  Stream(Stream &&other) noexcept;
  Stream &operator=(Stream &&) = delete;
  void *native() const { return native_; }

 private:
  std::shared_ptr<const Device> device_;
  void *native_ = nullptr;
};

class SUROGATE_API Event {
 public:
  Event(std::shared_ptr<const Device> device, bool timed);
  ~Event();
  Event(Event &&other) noexcept;
  Event &operator=(Event &&) = delete;

  void record(const Stream &stream, bool external = false) const;
  void wait(const Stream &stream) const;  // the stream waits
  void synchronize() const;               // the caller waits
  double seconds_since(const Event &begin) const;

 private:
  std::shared_ptr<const Device> device_;
  void *native_ = nullptr;
};

// What was put on a stream between two calls, ready to be put there again at once.
class SUROGATE_API Graph {
 public:
  // Runs `issue`, which puts work on `stream` and on streams that wait for its events.
  template <class Issue>
  Graph(std::shared_ptr<const Device> device, const Stream &stream, Issue &&issue) : device_(std::move(device)) {
    begin(stream);
    try {
      issue();
    } catch (...) {
      abandon(stream);
      throw;
    }
    end(stream);
  }
  ~Graph();
  Graph(const Graph &) = delete;
  Graph &operator=(const Graph &) = delete;
  void launch(const Stream &stream) const;

 private:
  void begin(const Stream &stream) const;
  void end(const Stream &stream);
  void abandon(const Stream &stream) const noexcept;

  std::shared_ptr<const Device> device_;
  void *native_ = nullptr;
};

}  // namespace surogate
