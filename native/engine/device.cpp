#include "device.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "registry.h"
#include "thread_pool.h"

namespace surogate {
namespace {

constexpr size_t kMessage = 512;

[[noreturn]] void throw_device_error(const std::string &backend, const char *message) {
  throw Error("device '" + backend + "': " + (message[0] != '\0' ? message : "no reason was given"));
}

}  // namespace

// Pinned memory of the host, in slots that copies take in turn. A slot is taken again once the copy out of it, or into
// it, is over.
class Staging {
 public:
  explicit Staging(const std::shared_ptr<Device> &device) : device_(device.get()) {
    memory_ = static_cast<char *>(device->allocate(kSlots * kSlotBytes, SG_MEMORY_PINNED, "staging between host and device"));
    for (size_t i = 0; i < kSlots; ++i) done_.emplace_back(device, false);
  }
  ~Staging() { device_->release(memory_, SG_MEMORY_PINNED); }
  Staging(const Staging &) = delete;
  Staging &operator=(const Staging &) = delete;

  // One thread fills pinned memory at a third of the rate of the bus: large copies have some.
  void upload(char *to, const char *from, uint64_t bytes, const Stream &stream) {
    struct Piece {
      size_t slot;
      uint64_t at, size;
    };
    struct Batch {
      Staging *staging;
      const char *from;
      Piece pieces[kCopiers];
    } batch{this, from, {}};
    const auto fill = [](void *context, int64_t task, int32_t) {
      const Batch &b = *static_cast<Batch *>(context);
      const Piece &piece = b.pieces[task];
      std::memcpy(b.staging->place(piece.slot), b.from + piece.at, piece.size);
    };
    if (bytes > kSlotBytes && pool_ == nullptr) {
      const auto half = static_cast<int32_t>(std::thread::hardware_concurrency() / 2);
      pool_ = std::make_unique<ThreadPool>(std::clamp<int32_t>(half, 1, kCopiers));
    }
    for (uint64_t at = 0; at < bytes;) {
      int32_t count = 0;
      for (; count < kCopiers && at < bytes; ++count) {
        const uint64_t size = std::min<uint64_t>(kSlotBytes, bytes - at);
        batch.pieces[count] = {take(), at, size};
        at += size;
      }
      if (count == 1) {
        fill(&batch, 0, 0);
      } else {
        pool_->parallel_for(count, fill, &batch);
      }
      for (const Piece *piece = batch.pieces; piece < batch.pieces + count; ++piece) {
        device_->copy(to + piece->at, place(piece->slot), piece->size, stream.native());
        done_[piece->slot].record(stream);
        used_[piece->slot] = true;
      }
    }
  }

  // The copies of several slots are under way while the first ones are emptied.
  void download(char *to, const char *from, uint64_t bytes, const Stream &stream) {
    struct Pending {
      size_t slot;
      uint64_t at, size;
    };
    std::vector<Pending> pending;
    auto finish = [&](const Pending &p) {
      done_[p.slot].synchronize();
      std::memcpy(to + p.at, place(p.slot), p.size);
    };
    size_t finished = 0;
    for (uint64_t at = 0; at < bytes; at += kSlotBytes) {
      if (pending.size() - finished == kSlots / 2) finish(pending[finished++]);
      const uint64_t size = std::min<uint64_t>(kSlotBytes, bytes - at);
      const size_t slot = take();
      device_->copy(place(slot), from + at, size, stream.native());
      done_[slot].record(stream);
      used_[slot] = true;
      pending.push_back({slot, at, size});
    }
    while (finished < pending.size()) finish(pending[finished++]);
  }

 private:
  static constexpr size_t kSlots = 16;
  static constexpr int32_t kCopiers = 4;
  static constexpr uint64_t kSlotBytes = uint64_t{2} << 20;

  char *place(size_t slot) const { return memory_ + slot * kSlotBytes; }
  size_t take() {
    const size_t slot = next_;
    next_ = (next_ + 1) % kSlots;
    if (used_[slot]) done_[slot].synchronize();
    return slot;
  }

  const Device *device_;
  char *memory_ = nullptr;
  std::vector<Event> done_;
  bool used_[kSlots] = {};
  size_t next_ = 0;
  std::unique_ptr<ThreadPool> pool_;
};

template <class Function, class... Args>
void Device::call(Function function, Args... args) const {
  char message[kMessage] = "";
  if (function(args..., message, sizeof(message)) != SG_OK) {
    message[kMessage - 1] = '\0';
    throw_device_error(backend_, message);
  }
}

Device::Device(std::string backend, const sg_backend *table, int32_t index)
    : backend_(std::move(backend)), table_(table), index_(index) {}

Device::~Device() = default;

std::shared_ptr<Device> Device::open(const std::string &backend, int32_t index) {
  static std::mutex mutex;
  // Kept for the life of the process: taking a device down when the process ends is the driver's business, which may
  // be gone before our static objects are.
  static auto &open_devices = *new std::map<std::pair<std::string, int32_t>, std::shared_ptr<Device>>;
  std::lock_guard lock(mutex);
  std::shared_ptr<Device> &device = open_devices[{backend, index}];
  if (device != nullptr) return device;
  const sg_backend *table = nullptr;
  if (backend != "cpu") {
    table = Registry::global().backend(backend);
  }
  int32_t count = 1;
  char message[kMessage] = "";
  if (table != nullptr && table->num_devices(&count, message, sizeof(message)) != SG_OK) {
    throw_device_error(backend, message);
  }
  if (index < 0 || index >= count) {
    throw Error("there is no device " + std::to_string(index) + " of backend '" + backend + "'",
                "it has " + std::to_string(count) + (count == 1 ? " device" : " devices") + ", counted from 0");
  }
  device = std::shared_ptr<Device>(new Device(backend, table, index));
  return device;
}

sg_device_info Device::info() const {
  sg_device_info info{};
  info.struct_size = sizeof(info);
  if (is_host()) throw Error("the host is no device that a backend describes");
  call(table_->device_info, index_, &info);
  return info;
}

void Device::activate() const {
  if (!is_host()) call(table_->activate, index_);
}

void *Device::allocate(uint64_t bytes, int32_t kind, const std::string &what) const {
  activate();
  void *data = nullptr;
  char message[kMessage] = "";
  if (table_->allocate(bytes, kind, &data, message, sizeof(message)) != SG_OK) {
    const std::string free = kind == SG_MEMORY_DEVICE ? "; " + std::to_string(info().free_bytes) + " are free" : "";
    throw Error(std::to_string(bytes) + " bytes for " + what + " could not be had on device '" + backend_ + "': " + message +
                    free,
                "use a smaller batch, a shorter sequence, or a smaller memory budget for saved tensors");
  }
  return data;
}

void Device::release(void *data, int32_t kind) const { table_->release(data, kind); }

void Device::copy(void *to, const void *from, uint64_t bytes, void *stream) const {
  activate();
  call(table_->copy, to, from, bytes, stream);
}

void Device::clear(void *data, uint64_t bytes, void *stream) const {
  activate();
  call(table_->clear, data, 0, bytes, stream);
}

void Device::synchronize(void *stream) const {
  activate();
  call(table_->stream_synchronize, stream);
}

void Device::upload(void *to, const void *from, uint64_t bytes, const Stream &stream) {
  std::lock_guard lock(staging_mutex_);
  if (staging_ == nullptr) staging_ = std::make_unique<Staging>(shared_from_this());
  staging_->upload(static_cast<char *>(to), static_cast<const char *>(from), bytes, stream);
}

void Device::download(void *to, const void *from, uint64_t bytes, const Stream &stream) {
  std::lock_guard lock(staging_mutex_);
  if (staging_ == nullptr) staging_ = std::make_unique<Staging>(shared_from_this());
  staging_->download(static_cast<char *>(to), static_cast<const char *>(from), bytes, stream);
}

Stream::Stream(std::shared_ptr<const Device> device) : device_(std::move(device)) {
  device_->activate();
  device_->call(device_->table_->stream_create, &native_);
}
Stream::~Stream() {
  if (native_ != nullptr) device_->table_->stream_destroy(native_);
}
Stream::Stream(Stream &&other) noexcept
    : device_(std::move(other.device_)), native_(std::exchange(other.native_, nullptr)) {}

Event::Event(std::shared_ptr<const Device> device, bool timed) : device_(std::move(device)) {
  device_->activate();
  device_->call(device_->table_->event_create, &native_, timed ? 1 : 0);
}
Event::~Event() {
  if (native_ != nullptr) device_->table_->event_destroy(native_);
}
Event::Event(Event &&other) noexcept
    : device_(std::move(other.device_)), native_(std::exchange(other.native_, nullptr)) {}

void Event::record(const Stream &stream, bool external) const {
  device_->call(device_->table_->event_record, native_, stream.native(), external ? 1 : 0);
}
void Event::wait(const Stream &stream) const {
  device_->call(device_->table_->event_wait, native_, stream.native());
}
void Event::synchronize() const { device_->call(device_->table_->event_synchronize, native_); }
double Event::seconds_since(const Event &begin) const {
  double seconds = 0.0;
  device_->call(device_->table_->event_seconds, begin.native_, native_, &seconds);
  return seconds;
}

Graph::~Graph() {
  if (native_ != nullptr) device_->table_->graph_destroy(native_);
}
void Graph::begin(const Stream &stream) const { device_->call(device_->table_->capture_begin, stream.native()); }
void Graph::end(const Stream &stream) {
  device_->call(device_->table_->capture_end, stream.native(), &native_);
}
void Graph::abandon(const Stream &stream) const noexcept {
  void *graph = nullptr;
  char message[kMessage] = "";
  device_->table_->capture_end(stream.native(), &graph, message, sizeof(message));
  if (graph != nullptr) device_->table_->graph_destroy(graph);
}
void Graph::launch(const Stream &stream) const {
  device_->call(device_->table_->graph_launch, native_, stream.native());
}

}  // namespace surogate
