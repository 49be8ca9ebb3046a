// The active messages of a UCX peer: headers and payloads as they arrive, with puts and gets of ours under
// way.
//
// Input: messages {u8 bit 0: by rendezvous, bit 1: a message is taken by the reader afterwards, bit 2: short
// header {u8 kind, u8 channel, u16 number, u8 region, u8 generation, u16 offset, u16 length, u8 landed}; u16
// payload length, payload} or with a WireHeader in full. The link is this file's: it sends nothing.
#include <list>

#include "tests/fuzz/input.h"
#include "transports/ucx.h"

namespace gpupool::transport {

// ---- a link without UCX; of ucx_link.cpp only this
UcxLink::UcxLink(const Options&, const std::string&)
    : ucx_([]() -> const UcxLibrary& {
        static const UcxLibrary none;
        return none;
      }()) {}
UcxLink::~UcxLink() = default;
std::unique_ptr<UcxLink> UcxLink::accept(int, const Options& options, UcxGreeting&) {
  return std::unique_ptr<UcxLink>(new UcxLink(options, ""));
}
std::unique_ptr<UcxLink> UcxLink::connect(int bootstrap, const Options& options, UcxGreeting& greeting) {
  return accept(bootstrap, options, greeting);
}
void UcxLink::sayReady(int, Deadline) {}
void UcxLink::awaitReady(int, Deadline) {}
void UcxLink::shutdown() {}
// UCX reads the payload before it says that it is done.
void UcxLink::send(const WireHeader&, const void* payload, size_t bytes, uint32_t, Done done) {
  fuzz::touch(payload, bytes);
  if (done) done(true);
}
void UcxLink::receive(void* data, void* to, size_t bytes, Done done) {
  std::memcpy(to, data, bytes);
  done(true);
}

struct UcxSeam {
  static constexpr size_t kPage = 4096;
  std::unique_ptr<Ucx> ucx;
  std::unique_ptr<std::byte[]> memory{new std::byte[600]}, target{new std::byte[100]};

  UcxSeam() {
    Options options;
    options.callBytes = options.controlBytes = kPage;
    UcxGreeting greeting;
    ucx.reset(new Ucx(UcxLink::accept(-1, options, greeting), options));
    std::memset(memory.get(), 0, 600);
    ucx->local_.add(SharedMemory::borrow(memory.get(), 600));
    Region gone = ucx->local_.add(SharedMemory::borrow(memory.get(), 8));
    ucx->local_.remove(gone);
    // Under way: a put of ours, and a get of 100 bytes.
    ucx->puts_[1] = {ucx->transfers_->begin(), 64, true, false, true};
    ucx->putBytes_ = 64;
    Ucx::Request get;
    get.header.length = 100;
    get.target = target.get();
    get.transfer = ucx->transfers_->begin();
    ucx->gets_[2] = get;
    ucx->lanes_[0].sent = 1024;
  }
  bool received(const WireHeader& header, void* data, size_t length, bool rendezvous) {
    return ucx->received(header, data, length, rendezvous);
  }
};

}  // namespace gpupool::transport

using namespace gpupool;
using namespace gpupool::transport;

namespace {

WireHeader shortHeader(fuzz::Input& input) {
  WireHeader header;
  header.kind = static_cast<WireKind>(input.value<uint8_t>());
  header.channel = input.value<uint8_t>();
  header.number = input.value<uint16_t>();
  header.region.id = input.value<uint8_t>();
  header.region.generation = input.value<uint8_t>();
  header.offset = input.value<uint16_t>();
  header.length = input.value<uint16_t>();
  header.landed = input.value<uint8_t>();
  return header;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  UcxSeam seam;
  for (int messages = 0; messages < 64 && !input.empty(); ++messages) {
    const auto flags = input.value<uint8_t>();
    const WireHeader header = (flags & 4) != 0 ? shortHeader(input) : input.value<WireHeader>();
    auto bytes = input.blob();
    std::vector<std::byte> payload(bytes.begin(), bytes.end());
    payload.reserve(1);  // UCX gives no null either
    seam.received(header, payload.data(), payload.size(), (flags & 1) != 0);
    if ((flags & 2) != 0) {
      for (Channel channel : {Channel::call, Channel::control})
        if (seam.ucx->pending(channel)) {
          auto message = seam.ucx->receive(channel, Deadline::min());
          fuzz::touch(message.data(), message.size());
        }
    }
  }
  return 0;
}
