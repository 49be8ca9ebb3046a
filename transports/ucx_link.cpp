#include "transports/ucx_link.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "base/log.h"

namespace gpupool::transport {

namespace {

constexpr unsigned kMessageId = 1;
constexpr int kRetries = 7;              // the most that fit InfiniBand's three bits
constexpr int64_t kShortestRetry = 100;  // milliseconds
// Unpacking believes the lengths in a key: whatever they say, it stays within zeros.
constexpr size_t kKeyBytes = 1 << 10;
constexpr size_t kKeyRoom = 32 << 10;
constexpr std::chrono::seconds kShutdownBound{1};

}  // namespace

UcxLink::UcxLink(const Options& options, const UcxWire& wire, bool worker)
    : ucx_(UcxLibrary::get(wire.rdma && worker)), keys_(std::make_shared<std::set<ucp_rkey_h>>()) {
  ucp_config_t* config = nullptr;
  check(ucx_.ucp_config_read(nullptr, nullptr, &config), "read its configuration");
  configure(config, options, wire);
  ucp_params_t params{};
  params.field_mask =
      UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP | (wire.rdma ? UCP_FEATURE_RMA : 0);
  params.mt_workers_shared = wire.rdma;  // other threads register memory
  params.estimated_num_eps = 1;
  ucs_status_t status = ucx_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  ucx_.ucp_config_release(config);
  check(status, "initialise (is the network device named in the configuration there?)");

  if (wire.rdma) registered_ = std::make_shared<UcxMemory>(ucx_, context_);

  ucp_worker_params_t threads{};
  threads.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  threads.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucx_.ucp_worker_create(context_, &threads, &worker_), "create a worker");
  check(ucx_.ucp_worker_get_efd(worker_, &eventDescriptor_), "give a descriptor to wait on");
  ucp_am_handler_param_t handler{};
  handler.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = onMessage;
  handler.arg = this;
  check(ucx_.ucp_worker_set_am_recv_handler(worker_, &handler), "register a handler");
}

void UcxLink::load() { const UcxLink first(Options{}, UcxWire{}, false); }

// The user's own UCX_* settings win. Without UCX_TLS it is one wire, on the one device that leads to the peer
// (UCX would open lanes on every interface it finds, reachable or not), set up so that different versions of
// UCX understand each other: with all devices, or the second protocol generation on one side only, 1.13
// and 1.16 do not connect.
void UcxLink::configure(ucp_config_t* config, const Options& options, const UcxWire& wire) {
  auto set = [&](const char* name, const std::string& value) {
    if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr && !value.empty()) {
      ucx_.ucp_config_modify(config, name,
                             value.c_str());  // one that a version does not know is not needed there
    }
  };
  if (std::getenv("UCX_TLS") == nullptr) {
    set("TLS", wire.rdma ? "rc_verbs" : "tcp");
    set("CM_USE_ALL_DEVICES", "n");
    set("PROTO_ENABLE", "n");
    // With a key of the sender's in its request, UCX 1.16 to 1.19 crash when the peer dies before it was used
    // (they withdraw the memory from a registration cache that there is none of:
    // ucp_request_memh_invalidate).
    set("RNDV_SCHEME", "put_zcopy");
    if (wire.rdma) {
      set("SOCKADDR_TLS_PRIORITY", "rdmacm");  // a listener of TCP's cannot connect queue pairs
      // A host that does not answer is lost after retries of this each, peerTimeout in all.
      auto each = std::max<int64_t>(options.peerTimeout.count() / (kRetries + 1), kShortestRetry);
      set("RC_TIMEOUT", std::to_string(each) + "ms");
      set("RC_RETRY_COUNT", std::to_string(kRetries));
    }
    set("NET_DEVICES", wire.device);
  }
  if (!options.networkDevice.empty()) {
    ucx_.ucp_config_modify(config, "NET_DEVICES", wire.device.c_str());
  }
}

UcxLink::~UcxLink() {
  shutdown();
  if (registered_) registered_->stop();
  for (ucp_rkey_h key : *keys_) ucx_.ucp_rkey_destroy(key);
  keys_->clear();
  if (listener_) ucx_.ucp_listener_destroy(listener_);
  if (worker_) ucx_.ucp_worker_destroy(worker_);
  if (context_) ucx_.ucp_cleanup(context_);
}

void UcxLink::check(ucs_status_t status, const char* what) const {
  if (status != UCS_OK) {
    throw std::runtime_error(std::string("ucx: cannot ") + what + ": " + ucx_.ucs_status_string(status));
  }
}

ucp_ep_h UcxLink::createEndpoint(ucp_ep_params_t& params) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {onError, this};
  ucp_ep_h endpoint = nullptr;
  check(ucx_.ucp_ep_create(worker_, &params, &endpoint), "connect");
  return endpoint;
}

void UcxLink::onConnection(ucp_conn_request_h request, void* self) {
  static_cast<UcxLink*>(self)->requests_.push_back(request);
}

void UcxLink::onError(void* self, ucp_ep_h endpoint, ucs_status_t status) {
  auto& link = *static_cast<UcxLink*>(self);
  if (link.endpoint_ == endpoint) link.fail(status);  // a stranger's end is closed with the others
}

void UcxLink::fail(ucs_status_t status) {
  if (!failure_.empty()) return;
  failure_ = std::string("the network connection failed: ") + ucx_.ucs_status_string(status);
  if (sink_) sink_->failed(failure_);
}

// --- messages ---

ucs_status_t UcxLink::onMessage(void* self, const void* header, size_t headerBytes, void* data, size_t bytes,
                                const ucp_am_recv_param_t* param) {
  auto& link = *static_cast<UcxLink*>(self);
  WireHeader message;
  if (headerBytes != sizeof message) return UCS_OK;
  std::memcpy(&message, header, sizeof message);
  bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (link.sink_) {
    return link.sink_->received(message, data, bytes, rendezvous) && rendezvous ? UCS_INPROGRESS : UCS_OK;
  }
  if (message.kind == WireKind::welcome) link.welcomed_ = true;
  if (message.kind == WireKind::hello && !link.endpoint_ &&
      (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) && message.number == link.nonce_[0] &&
      message.offset == link.nonce_[1]) {
    link.endpoint_ = param->reply_ep;
  }
  return UCS_OK;  // anything else before the sink is set comes from a stranger
}

UcxLink::Operation* UcxLink::newOperation(const WireHeader& header, Done done) {
  operations_.push_back(std::make_unique<Operation>(Operation{this, header, std::move(done), {}}));
  operations_.back()->self = std::prev(operations_.end());
  return operations_.back().get();
}

void UcxLink::send(const WireHeader& header, const void* payload, size_t bytes, uint32_t flags, Done done) {
  Operation* operation = newOperation(header, std::move(done));
  if (finished_) return finish(operation, UCS_ERR_CANCELED);
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.send = onSent;
  params.user_data = operation;
  params.flags = flags;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  ucs_status_ptr_t result = ucx_.ucp_am_send_nbx(endpoint_, kMessageId, &operation->header,
                                                 sizeof operation->header, payload, bytes, &params);
  watch(result, operation);
}

void UcxLink::receive(void* data, void* to, size_t bytes, Done done) {
  Operation* operation = newOperation({}, std::move(done));
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.recv_am = onReceived;
  params.user_data = operation;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  watch(ucx_.ucp_am_recv_data_nbx(worker_, data, to, bytes, &params), operation);
}

void UcxLink::onSent(void* request, ucs_status_t status, void* operation) {
  auto* done = static_cast<Operation*>(operation);
  done->link->ucx_.ucp_request_free(request);
  done->link->finish(done, status);
}

void UcxLink::onReceived(void* request, ucs_status_t status, size_t, void* operation) {
  onSent(request, status, operation);
}

void UcxLink::finish(Operation* operation, ucs_status_t status) {
  std::unique_ptr<Operation> owned = std::move(*operation->self);
  operations_.erase(owned->self);
  if (owned->done) owned->done(status == UCS_OK);
  if (status != UCS_OK && !finished_) fail(status);
}

// --- one-sided transfers ---

std::shared_ptr<ucp_rkey> UcxLink::unpackKey(std::span<const std::byte> packed) {
  if (packed.empty() || packed.size() > kKeyBytes || finished_) return nullptr;
  std::vector<std::byte> room(kKeyRoom);
  std::memcpy(room.data(), packed.data(), packed.size());
  ucp_rkey_h key = nullptr;
  if (ucx_.ucp_ep_rkey_unpack(endpoint_, room.data(), &key) != UCS_OK) return nullptr;
  keys_->insert(key);
  return {key, [this, keys = keys_](ucp_rkey_h gone) {
            if (keys->erase(gone) != 0) ucx_.ucp_rkey_destroy(gone);
          }};
}

namespace {

ucp_request_param_t oneSided(void* operation, ucp_send_nbx_callback_t done, const Registration* registered) {
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.send = done;
  params.user_data = operation;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  if (registered) {  // ignored by 1.13, which finds it in its cache
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    params.memh = registered->handle();
  }
  return params;
}

}  // namespace

void UcxLink::get(void* local, size_t bytes, uint64_t remote, ucp_rkey_h key, const Registration* registered,
                  Done done) {
  Operation* operation = newOperation({}, std::move(done));
  if (finished_) return finish(operation, UCS_ERR_CANCELED);
  ucp_request_param_t params = oneSided(operation, onSent, registered);
  watch(ucx_.ucp_get_nbx(endpoint_, local, bytes, remote, key, &params), operation);
}

void UcxLink::put(const void* local, size_t bytes, uint64_t remote, ucp_rkey_h key,
                  const Registration* registered, Done done) {
  // UCX has let go of the source; the flush says that the destination has it.
  Operation* operation = newOperation({}, [this, done = std::move(done)](bool ok) {
    if (ok)
      flush(done);
    else
      done(false);
  });
  if (finished_) return finish(operation, UCS_ERR_CANCELED);
  ucp_request_param_t params = oneSided(operation, onSent, registered);
  watch(ucx_.ucp_put_nbx(endpoint_, local, bytes, remote, key, &params), operation);
}

void UcxLink::flush(Done done) {
  Operation* operation = newOperation({}, std::move(done));
  if (finished_) return finish(operation, UCS_ERR_CANCELED);
  ucp_request_param_t params = oneSided(operation, onSent, nullptr);
  params.op_attr_mask &= ~UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  watch(ucx_.ucp_ep_flush_nbx(endpoint_, &params), operation);
}

void UcxLink::watch(ucs_status_ptr_t result, Operation* operation) {
  if (!UCS_PTR_IS_PTR(result)) finish(operation, UCS_PTR_RAW_STATUS(result));
}

// --- the end ---

void UcxLink::closeEndpoint(ucp_ep_h endpoint) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  ucs_status_ptr_t result = ucx_.ucp_ep_close_nbx(endpoint, &params);
  if (!UCS_PTR_IS_PTR(result)) return;
  Deadline deadline = Clock::now() + kShutdownBound;
  while (ucx_.ucp_request_check_status(result) == UCS_INPROGRESS && Clock::now() < deadline) {
    if (!progress()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ucx_.ucp_request_free(result);
}

void UcxLink::shutdown() {
  if (std::exchange(finished_, true)) return;
  sink_ = nullptr;
  if (endpoint_) closeEndpoint(endpoint_);
  for (ucp_ep_h candidate : candidates_) {
    if (candidate != endpoint_) closeEndpoint(candidate);
  }
  for (ucp_conn_request_h request : requests_) {
    if (listener_) ucx_.ucp_listener_reject(listener_, request);
  }
  // Cancelled operations report within progress.
  for (Deadline deadline = Clock::now() + kShutdownBound; !operations_.empty() && Clock::now() < deadline;) {
    if (!progress()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (!operations_.empty()) {
    GPUPOOL_WARNING("ucx: %zu operations did not end with their connection", operations_.size());
  }
}

}  // namespace gpupool::transport
