// The active messages of a UCX peer: headers and payloads as they arrive, with puts and gets of ours under
// way. Everything is the product's but UCX itself, which is this file's (libucp below): it carries nothing,
// and ends what was begun when the input says so.
//
// Input: u8 bit 0: over RDMA, bit 1: this side is the client, bit 2: UCX takes its time; then messages {u8
// bit 0: by rendezvous, bit 1: a message is taken by the reader afterwards, bit 2: short header {u8 kind, u8
// channel, u16 number, u8 region, u8 generation, u16 offset, u16 length, u8 landed}, else a WireHeader in
// full, bit 3: something UCX has under way ends first, bit 4: the header is cut, bit 5: this side first puts,
// bit 6: gets, in the region that the header names; u16 payload length, payload}.
#include <deque>

#include "tests/fuzz/input.h"
#include "transports/ucx.h"

namespace gpupool::fuzz {
namespace {

// What libucp would have under way.
struct Libucp {
  struct Operation {
    std::function<void(ucs_status_t)> end;
  };
  bool slow = false;
  bool cancelled = false;
  ucp_am_handler_param_t handler{};
  std::deque<Operation> underWay;

  // Ends the oldest.
  unsigned progress() {
    if (underWay.empty()) return 0;
    auto operation = std::move(underWay.front());
    underWay.pop_front();
    operation.end(cancelled ? UCS_ERR_CANCELED : UCS_OK);
    return 1;
  }
  // happen: what UCX does to the memory it was given, at any time until it has said that it is done.
  ucs_status_ptr_t begin(std::function<void()> happen, const ucp_request_param_t* params, bool receives) {
    if (!slow) {
      happen();
      return nullptr;
    }
    void* request = new char;
    auto report = [params = *params, request, receives](ucs_status_t status) {
      receives ? params.cb.recv_am(request, status, 0, params.user_data)
               : params.cb.send(request, status, params.user_data);
    };
    underWay.push_back({[happen = std::move(happen), report](ucs_status_t status) {
      if (status == UCS_OK) happen();
      report(status);
    }});
    return request;
  }
};
Libucp libucp;

template <class Handle>
ucs_status_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new char);
  return UCS_OK;
}
template <class Handle>
void destroy(Handle handle) {
  delete reinterpret_cast<char*>(handle);
}

transport::UcxLibrary setUp() {
  transport::UcxLibrary ucx;
  ucx.ucp_config_read = [](const char*, const char*, ucp_config_t**) { return UCS_OK; };
  ucx.ucp_config_modify = [](ucp_config_t*, const char*, const char*) { return UCS_OK; };
  ucx.ucp_config_release = [](ucp_config_t*) {};
  ucx.ucp_init_version = [](unsigned, unsigned, const ucp_params_t*, const ucp_config_t*, ucp_context_h*) {
    return UCS_OK;
  };
  ucx.ucp_worker_create = [](ucp_context_h, const ucp_worker_params_t*, ucp_worker_h*) { return UCS_OK; };
  ucx.ucp_worker_get_efd = [](ucp_worker_h, int*) { return UCS_OK; };
  ucx.ucp_worker_set_am_recv_handler = [](ucp_worker_h, const ucp_am_handler_param_t* handler) {
    libucp.handler = *handler;
    return UCS_OK;
  };
  ucx.ucp_worker_progress = [](ucp_worker_h) { return libucp.progress(); };
  ucx.ucp_request_free = [](void* request) { delete static_cast<char*>(request); };
  ucx.ucs_status_string = [](ucs_status_t) { return "it failed"; };
  return ucx;
}

void addMessages(transport::UcxLibrary& ucx) {
  ucx.ucp_am_send_nbx = [](ucp_ep_h, unsigned, const void* header, size_t headerBytes, const void* payload,
                           size_t bytes, const ucp_request_param_t* params) {
    return libucp.begin(
        [=] {
          touch(header, headerBytes);
          touch(payload, bytes);
        },
        params, false);
  };
  ucx.ucp_am_recv_data_nbx = [](ucp_worker_h, void* data, void* to, size_t bytes,
                                const ucp_request_param_t* params) {
    const auto* from = static_cast<const std::byte*>(data);
    return libucp.begin([kept = std::vector<std::byte>(from, from + bytes),
                         to] { std::copy(kept.begin(), kept.end(), static_cast<std::byte*>(to)); },
                        params, true);
  };
}

void addOneSided(transport::UcxLibrary& ucx) {
  ucx.ucp_mem_map = [](ucp_context_h, const ucp_mem_map_params_t* params, ucp_mem_h* handle) {
    touch(params->address, params->length);
    return make(handle);
  };
  ucx.ucp_mem_unmap = [](ucp_context_h, ucp_mem_h handle) {
    destroy(handle);
    return UCS_OK;
  };
  ucx.ucp_rkey_pack = [](ucp_context_h, ucp_mem_h, void** key, size_t* bytes) {
    *key = new char[*bytes = 24]();
    return UCS_OK;
  };
  ucx.ucp_rkey_buffer_release = [](void* key) { delete[] static_cast<char*>(key); };
  ucx.ucp_ep_rkey_unpack = [](ucp_ep_h, const void* packed, ucp_rkey_h* key) {
    if ((*static_cast<const uint8_t*>(packed) & 1) != 0) return UCS_ERR_UNREACHABLE;
    return make(key);
  };
  ucx.ucp_rkey_destroy = [](ucp_rkey_h key) { destroy(key); };
  ucx.ucp_get_nbx = [](ucp_ep_h, void* to, size_t bytes, uint64_t, ucp_rkey_h key,
                       const ucp_request_param_t* params) {
    return libucp.begin(
        [=] {
          touch(key, 1);
          std::fill_n(static_cast<std::byte*>(to), bytes, std::byte{0x33});
        },
        params, false);
  };
  ucx.ucp_put_nbx = [](ucp_ep_h, const void* from, size_t bytes, uint64_t, ucp_rkey_h key,
                       const ucp_request_param_t* params) {
    return libucp.begin(
        [=] {
          touch(key, 1);
          touch(from, bytes);
        },
        params, false);
  };
  ucx.ucp_ep_flush_nbx = [](ucp_ep_h, const ucp_request_param_t* params) {
    return libucp.begin([] {}, params, false);
  };
}

}  // namespace
}  // namespace gpupool::fuzz

namespace gpupool::transport {

const UcxLibrary& UcxLibrary::get(bool) {
  static const auto* all = [] {
    auto* ucx = new UcxLibrary(fuzz::setUp());
    fuzz::addMessages(*ucx);
    fuzz::addOneSided(*ucx);
    return ucx;
  }();
  return *all;
}

struct UcxSeam {
  static constexpr size_t kPage = 4096, kBulk = 40 << 10;
  std::unique_ptr<std::byte[]> memory{new std::byte[600]()}, target{new std::byte[100]()},
      bulk{new std::byte[kBulk]()};
  std::unique_ptr<Ucx> ucx;

  UcxSeam(bool rdma, bool client) {
    Options options;
    options.callBytes = options.controlBytes = kPage;
    UcxWire wire;
    wire.rdma = rdma;
    std::unique_ptr<UcxLink> link(new UcxLink(options, wire, !client));
    ucx.reset(new Ucx(std::move(link), options, !client));
    ucx->link_->setSink(ucx.get());
    share(600);
    const Region gone = share(8);
    ucx->local_.remove(gone);
    if (rdma) ucx->forgetShared(gone);
    // Under way: a put of ours, and a get of 100 bytes.
    ucx->puts_[1] = {ucx->transfers_->begin(), 64, true, false, true};
    ucx->putBytes_ = 64;
    Ucx::Request get;
    get.header.kind = WireKind::get;
    get.header.length = 100;
    get.target = target.get();
    get.transfer = ucx->transfers_->begin();
    if (rdma && client) ucx->pointTo(get, WireKind::fill, target.get());
    ucx->gets_[2] = get;
    ucx->lanes_[0].sent = 1024;
  }
  // As the progress thread does at its end.
  ~UcxSeam() {
    fuzz::libucp.cancelled = true;
    ucx->link_->shutdown();
    ucx->transfers_->stop();
  }
  Region share(size_t bytes) {
    auto shared = SharedMemory::borrow(memory.get(), bytes);
    const Region region = ucx->local_.add(shared);
    Ucx::Request announcement;
    if (ucx->registered_) ucx->registerShared(region, shared, announcement);
    return region;
  }
  // False: by messages, so not here.
  bool direct(Region region, bool put) {
    Ucx::Request request;
    request.header = {.kind = put ? WireKind::put : WireKind::get, .region = region, .length = kBulk};
    request.source = request.target = bulk.get();
    request.transfer = ucx->transfers_->begin();
    if (!put) return ucx->getDirectly(request);
    request.header.number = ++puts_;
    ucx->puts_[puts_] = {request.transfer, kBulk, false, false, true};
    ucx->putBytes_ += kBulk;
    if (ucx->placeDirectly(request)) return true;
    ucx->puts_.erase(puts_);
    ucx->putBytes_ -= kBulk;
    return false;
  }

 private:
  uint64_t puts_ = 1;
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

void arrive(const WireHeader& header, std::span<const std::byte> payload, unsigned flags) {
  const auto* first = reinterpret_cast<const std::byte*>(&header);
  // Copies of their own length: what is read beyond them is seen.
  std::vector<std::byte> head(first, first + ((flags & 16) != 0 ? 40 : sizeof header));
  std::vector<std::byte> bytes(payload.begin(), payload.end());
  bytes.reserve(1);  // UCX gives no null either
  ucp_am_recv_param_t params{};
  if ((flags & 1) != 0) params.recv_attr = UCP_AM_RECV_ATTR_FLAG_RNDV;
  const auto& handler = fuzz::libucp.handler;
  handler.cb(handler.arg, head.data(), head.size(), bytes.data(), bytes.size(), &params);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto what = input.value<uint8_t>();
  fuzz::libucp = {};
  fuzz::libucp.slow = (what & 4) != 0;
  UcxSeam seam((what & 1) != 0, (what & 2) != 0);
  for (int messages = 0; messages < 64 && !input.empty(); ++messages) {
    const auto flags = input.value<uint8_t>();
    const WireHeader header = (flags & 4) != 0 ? shortHeader(input) : input.value<WireHeader>();
    if ((flags & 8) != 0) fuzz::libucp.progress();
    if ((flags & 32) != 0) seam.direct(header.region, true);
    if ((flags & 64) != 0) seam.direct(header.region, false);
    arrive(header, input.blob(), flags);
    if ((flags & 2) == 0) continue;
    for (Channel channel : {Channel::call, Channel::control})
      if (seam.ucx->pending(channel)) {
        auto message = seam.ucx->receive(channel, Deadline::min());
        fuzz::touch(message.data(), message.size());
      }
  }
  return 0;
}
