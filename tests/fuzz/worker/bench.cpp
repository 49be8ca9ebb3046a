#include "tests/fuzz/worker/bench.h"

#include <algorithm>
#include <cstring>

#include "schema/handle_ids.h"
#include "schema/rows.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/worker/fake_driver.h"

namespace gpupool::server {

// As admit(), with what would run beside the executor run at once.
bool SessionSeam::frame(Session& session, std::span<const std::byte> message, std::string& reason) {
  static Call call;
  const Handler* handler = session.check(message, call, reason);
  if (handler == nullptr) return false;
  session.execute(call);
  if (call.malformed != nullptr) {
    reason = std::string(handler->name) + ": " + call.malformed;
    return false;
  }
  session.completed_ = call.frame.seq;
  return true;
}

}  // namespace gpupool::server

namespace gpupool::fuzz {

using transport::SharedMemory;

namespace {

constexpr unsigned kDevices = 2;
constexpr uint64_t kLimit = uint64_t{256} << 20;

// One for all sessions: making it would take longer than what is tested.
server::HostPages pages() {
  static const server::HostPages all{
      SharedMemory::create(size_t{1} << 20, reinterpret_cast<void*>(kStagingAddress)),
      SharedMemory::create(schema::kWordsBytes), nullptr};
  return all;
}

}  // namespace

std::byte* Wire::reserve(transport::Channel channel, size_t bytes, transport::Deadline) {
  if (bytes > maxMessage(channel)) return nullptr;
  auto& out = out_[static_cast<size_t>(channel)];
  out.reset(new std::byte[bytes]);
  return out.get();
}
void Wire::commit(transport::Channel channel, size_t bytes) {
  touch(out_[static_cast<size_t>(channel)].get(), bytes);
}

std::span<const std::byte> Wire::receive(transport::Channel, transport::Deadline) {
  over_ = !next.has_value();  // the client said all it had to say
  auto message = next.value_or(std::span<const std::byte>());
  next.reset();
  return message;
}

transport::Transfer Wire::put(const void* local, transport::Region remote, uint64_t, size_t bytes) {
  if (remote.id != 1) return transport::kRefused;
  touch(local, std::min<size_t>(bytes, 4096));
  return 0;
}

namespace {

// So that little is cleared for each input.
class LittleHostMemory final : public server::OwnAccount {
 public:
  LittleHostMemory() : OwnAccount(std::vector<uint64_t>(kDevices, kLimit)) {}
  CUresult take(unsigned place, uint64_t bytes) override {
    if (place != kHost) return OwnAccount::take(place, bytes);
    return bytes <= size_t{256} << 10 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  }
};

}  // namespace

Bench::Bench(bool network, uint64_t seed) {
  DriverState& driver = driverState();
  driver.reset(seed);
  auto host = pages();
  std::memset(host.words->data(), 0, schema::kWordsOffset + 64 * 8);
  server::SessionStart start;
  start.epoch = kEpoch;
  start.devices.resize(kDevices);
  for (unsigned d = 0; d < kDevices; ++d) {
    start.devices[d].info.ordinal = d;
    start.devices[d].memoryBytes = kLimit;
  }
  auto wire = std::make_unique<Wire>(!network);
  wire_ = wire.get();
  session = std::make_unique<server::Session>(fakeDriver(), start, std::move(wire), host,
                                              std::make_unique<LittleHostMemory>());
  server::SessionSeam::forgetContext(*session);
}

Bench::~Bench() = default;

bool Bench::greet(std::span<const std::byte> hello) {
  wire_->next = hello;
  return server::SessionSeam::greet(*session, reason);
}

bool Bench::greet() {
  schema::ClientHello hello;
  hello.protocol = schema::kProtocolVersion;
  hello.rowsHash = schema::rowsHash();
  hello.epoch = kEpoch;
  hello.spaces = 0xf;
  return greet(std::as_bytes(std::span(&hello, 1)));
}

void Bench::mintObjects() {
  using handles::Kind;
  for (Kind kind :
       {Kind::context, Kind::stream, Kind::event, Kind::module, Kind::library, Kind::kernel, Kind::function,
        Kind::graph, Kind::graphNode, Kind::graphExec, Kind::array, Kind::mipmap, Kind::linkState})
    for (uint32_t index = 1; index <= 2; ++index)
      session->objects().mint(handles::makeHandle(kind, index, 1),
                              reinterpret_cast<void*>(driverState().fresh()));
}

}  // namespace gpupool::fuzz
