#include "server/worker/device_stream.h"

#include <algorithm>
#include <mutex>

#include "server/worker/part_receiver.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostReceived = 5;  // at a time, of those in shared memory

}  // namespace

std::string DeviceStream::prepare(std::shared_ptr<transport::SharedMemory> memory) {
  if (std::string why = pieces_.prepare(); !why.empty()) return why;
  if (pieces_.bytes() == 0) return "";
  try {
    // One after the other: whether there is memory is looked at before it is taken.
    static std::mutex creating;
    const std::lock_guard lock(creating);
    if (memory == nullptr)
      memory =
          transport::SharedMemory::create(std::min<uint64_t>(pieces_.bytes(), 2 * StateSocket::kPartBytes));
  } catch (const std::exception& e) {
    return std::string("no host memory to send device memory through: ") + e.what();
  }
  buffers_ = std::move(memory);
  // Without it copies are slower.
  session_.driver().cuMemHostRegister_v2(buffers_->data(), buffers_->size(), kHostRegistration);
  return "";
}

DeviceStream::~DeviceStream() {
  if (buffers_ == nullptr) return;
  pieces_.enter(pieces_.all().front().device);
  session_.driver().cuMemHostUnregister(buffers_->data());
}

DeviceStream::Part DeviceStream::cut(size_t buffer) {
  Part part = cutAny(buffer);
  while (!part.ranges.empty() && part.number % shares_ != share_) part = cutAny(buffer);
  return part;
}

DeviceStream::Part DeviceStream::cutAny(size_t buffer) {
  Part part;
  part.number = number_++;
  uint64_t bytes = 0;
  const auto& pieces = pieces_.all();
  while (piece_ < pieces.size() && bytes < StateSocket::kPartBytes) {
    const uint64_t taken = std::min(pieces[piece_].bytes - offset_, StateSocket::kPartBytes - bytes);
    part.ranges.push_back({piece_, offset_, taken});
    bytes += taken;
    offset_ += taken;
    if (offset_ < pieces[piece_].bytes) continue;
    ++piece_;
    offset_ = 0;
  }
  if (bytes != 0) part.bytes = {buffers_->data() + buffer * StateSocket::kPartBytes, bytes};
  return part;
}

std::string DeviceStream::copy(const Part& part, std::byte* at, bool out) {
  const Driver& driver = session_.driver();
  for (const Range& range : part.ranges) {
    CUdeviceptr address = 0;
    if (std::string why = pieces_.open(range.piece, address); !why.empty()) return why;
    address += range.offset;
    CUresult result = out ? driver.cuMemcpyDtoH_v2(at, address, range.bytes)
                          : driver.cuMemcpyHtoD_v2(address, at, range.bytes);
    // The copy may be under way still where the buffer could not be registered.
    if (result == CUDA_SUCCESS && !out) result = driver.cuStreamSynchronize(nullptr);
    if (result != CUDA_SUCCESS) return pieces_.failed(out ? "cuMemcpyDtoH" : "cuMemcpyHtoD", result);
    at += range.bytes;
  }
  return "";
}

std::string DeviceStream::fill(Part& part) {
  std::string why = copy(part, part.bytes.data(), true);
  if (why.empty()) part.checksum = checksumOf(part.bytes);
  return why;
}

bool DeviceStream::sayNumber(StateSocket& socket, const Part& part) const {
  return shares_ == 1 || socket.send(std::as_bytes(std::span(&part.number, 1)));
}

bool DeviceStream::hearNumber(StateSocket& socket, const Part& part) const {
  if (shares_ == 1) return true;
  uint64_t number = 0;
  if (!socket.receive(std::as_writable_bytes(std::span(&number, 1)))) return false;
  return number == part.number || socket.fail("the other worker sends another part than is awaited");
}

std::string DeviceStream::send(StateSocket& socket) {
  if (std::string why = prepare(); !why.empty()) return why;
  std::array<Part, 2> parts;
  std::future<std::string> filling;  // ends first, and before `parts`
  const auto fillNext = [&](size_t buffer) {
    parts[buffer] = cut(buffer);
    if (!parts[buffer].ranges.empty()) filling = beside([this, &part = parts[buffer]] { return fill(part); });
  };
  fillNext(0);
  for (size_t buffer = 0; !parts[buffer].ranges.empty(); buffer ^= 1) {
    if (std::string why = filling.get(); !why.empty()) return why;
    fillNext(buffer ^ 1);
    if (!sayNumber(socket, parts[buffer]) || !socket.sendPart(parts[buffer].bytes, parts[buffer].checksum))
      return socket.error();
  }
  return "";
}

std::string DeviceStream::read(std::vector<Checksum>& checksums) {
  if (std::string why = prepare(); !why.empty()) return why;
  for (Part part = cut(0); !part.ranges.empty(); part = cut(0)) {
    if (std::string why = fill(part); !why.empty()) return why;
    checksums.push_back(part.checksum);
  }
  return "";
}

// Parts are compared while one before them is copied, and the next ones come.
std::string DeviceStream::receive(StateSocket& socket) {
  if (std::string why = prepare(socket.offered()); !why.empty()) return why;
  const size_t most = socket.offered() == nullptr ? 2 : kMostReceived;
  PartReceiver comparing(socket, most, OrderedWork::helpers(), PartReceiver::placed);
  std::vector<Part> parts(comparing.parts());
  for (bool more = true; more || !comparing.empty();) {
    if (more && !comparing.full()) {
      Part& next = parts[comparing.next()] = cut(comparing.next());
      more = !next.ranges.empty();
      if (more && (!hearNumber(socket, next) || !comparing.receive(next.bytes))) return socket.error();
      continue;
    }
    if (std::string why = comparing.await(); !why.empty()) return why;
    const Part& part = parts[comparing.oldest()];
    if (std::string why = copy(part, comparing.bytes().data(), false); !why.empty()) return why;
    if (!comparing.drop()) return socket.error();
  }
  return "";
}

namespace {

// Both ends come to the same number.
template <class Transfer>
std::string dealOut(Session& session, StateSocket& socket, ParallelSockets& parallel, Transfer transfer) {
  const DevicePieces::List pieces = DevicePieces::of(session);
  uint64_t bytes = 0;
  for (const Space::PieceState& piece : *pieces) bytes += piece.bytes;
  const size_t parts = std::max<uint64_t>(1, (bytes + StateSocket::kPartBytes - 1) / StateSocket::kPartBytes);
  const size_t shares = std::min<size_t>(parallel.shares(), parts);
  return parallel.together(socket, shares, [&](StateSocket& one, size_t share) {
    DeviceStream stream(session, pieces, share, shares);
    return transfer(stream, one);
  });
}

}  // namespace

std::string sendDevices(Session& session, StateSocket& socket, ParallelSockets& parallel) {
  return dealOut(session, socket, parallel,
                 [](DeviceStream& stream, StateSocket& one) { return stream.send(one); });
}

std::string receiveDevices(Session& session, StateSocket& socket, ParallelSockets& parallel) {
  return dealOut(session, socket, parallel,
                 [](DeviceStream& stream, StateSocket& one) { return stream.receive(one); });
}

}  // namespace gpupool::server
