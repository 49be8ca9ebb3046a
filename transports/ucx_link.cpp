#include "transports/ucx_link.h"

#include <poll.h>
#include <sys/random.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "base/log.h"
#include "transports/network_address.h"

namespace gpupool::transport {

namespace {

constexpr unsigned kMessageId = 1;
constexpr uint64_t kMagic = 0x58'43'55'4c'4f'4f'50'47;
constexpr uint32_t kProtocol = 1;
constexpr size_t kMaxCandidates = 8;
constexpr std::chrono::seconds kShutdownBound{1};

// UCX's own threads inherit the mask of the thread that makes them: none of the application's signals there.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

UcxLink::UcxLink(const Options& options, const std::string& interface) : ucx_(UcxLibrary::get()) {
  ucp_config_t* config = nullptr;
  check(ucx_.ucp_config_read(nullptr, nullptr, &config), "read its configuration");
  configure(config, options, interface);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = 1;
  ucs_status_t status = ucx_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  ucx_.ucp_config_release(config);
  check(status, "initialise (is the network device named in the configuration there?)");

  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucx_.ucp_worker_create(context_, &worker, &worker_), "create a worker");
  check(ucx_.ucp_worker_get_efd(worker_, &eventDescriptor_), "give a descriptor to wait on");
  ucp_am_handler_param_t handler{};
  handler.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = onMessage;
  handler.arg = this;
  check(ucx_.ucp_worker_set_am_recv_handler(worker_, &handler), "register a handler");
}

// The user's own UCX_* settings win. Without UCX_TLS it is TCP, on the one interface that leads to the peer
// (UCX would open lanes on every interface it finds, reachable or not), set up so that different versions of
// UCX understand each other: with all devices, or the second protocol generation on one side only, 1.13
// and 1.16 do not connect.
void UcxLink::configure(ucp_config_t* config, const Options& options, const std::string& interface) {
  auto set = [&](const char* name, const std::string& value) {
    if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr && !value.empty()) {
      ucx_.ucp_config_modify(config, name,
                             value.c_str());  // one that a version does not know is not needed there
    }
  };
  if (std::getenv("UCX_TLS") == nullptr) {
    set("TLS", "tcp");
    set("CM_USE_ALL_DEVICES", "n");
    set("PROTO_ENABLE", "n");
    if (options.networkDevice.empty()) set("NET_DEVICES", interface);
  }
  if (!options.networkDevice.empty()) {
    ucx_.ucp_config_modify(config, "NET_DEVICES", options.networkDevice.c_str());
  }
}

UcxLink::~UcxLink() {
  shutdown();
  if (listener_) ucx_.ucp_listener_destroy(listener_);
  if (worker_) ucx_.ucp_worker_destroy(worker_);
  if (context_) ucx_.ucp_cleanup(context_);
}

void UcxLink::check(ucs_status_t status, const char* what) const {
  if (status != UCS_OK) {
    throw std::runtime_error(std::string("ucx: cannot ") + what + ": " + ucx_.ucs_status_string(status));
  }
}

// --- set-up ---

std::unique_ptr<UcxLink> UcxLink::accept(int bootstrap, const Options& options, UcxGreeting& greeting) {
  SignalsBlocked quiet;
  Deadline deadline = Clock::now() + options.setupTimeout;
  std::string address = options.bindAddress.empty() ? localAddress(bootstrap) : options.bindAddress;
  std::unique_ptr<UcxLink> link(new UcxLink(options, interfaceOf(address)));
  link->listen(address);
  greeting.magic = kMagic;
  strncpy(greeting.version, link->ucx_.ucp_get_version_string(), sizeof greeting.version - 1);
  greeting.protocol = kProtocol;
  if (getrandom(greeting.nonce, sizeof greeting.nonce, 0) != sizeof greeting.nonce) {
    throw std::runtime_error(errorText("ucx: getrandom"));
  }
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  link->check(link->ucx_.ucp_listener_query(link->listener_, &attributes), "tell the listener's port");
  greeting.addressBytes = socketAddressBytes(attributes.sockaddr);
  std::memcpy(greeting.address, &attributes.sockaddr, greeting.addressBytes);
  std::memcpy(link->nonce_, greeting.nonce, sizeof link->nonce_);
  if (!sendAll(bootstrap, &greeting, sizeof greeting, deadline)) {
    throw std::runtime_error("ucx: the client went away during set-up");
  }
  link->awaitClient(bootstrap, deadline);
  return link;
}

std::unique_ptr<UcxLink> UcxLink::connect(int bootstrap, const Options& options, UcxGreeting& greeting) {
  SignalsBlocked quiet;
  Deadline deadline = Clock::now() + options.setupTimeout;
  if (!receiveAll(bootstrap, &greeting, sizeof greeting, deadline)) {
    throw std::runtime_error("ucx: no greeting from the worker");
  }
  if (greeting.magic != kMagic || greeting.protocol != kProtocol ||
      greeting.addressBytes > sizeof greeting.address) {
    throw std::runtime_error("ucx: the worker speaks another version of the transport");
  }
  sockaddr_storage target{};
  std::memcpy(&target, greeting.address, greeting.addressBytes);
  completeAddress(target, bootstrap);
  std::unique_ptr<UcxLink> link(new UcxLink(options, interfaceTowards(bootstrap, target)));
  link->lastStep_ = deadline - options.setupTimeout;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&target), socketAddressBytes(target)};
  link->endpoint_ = link->createEndpoint(params);
  WireHeader hello{.kind = WireKind::hello, .number = greeting.nonce[0], .offset = greeting.nonce[1]};
  link->send(hello, nullptr, 0, UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY, {});
  try {
    link->awaitWelcome(bootstrap, deadline);
  } catch (const std::exception& error) {
    greeting.version[sizeof greeting.version - 1] = 0;
    throw std::runtime_error(error.what() + std::string(" (UCX ") + link->ucx_.ucp_get_version_string() +
                             " here, " + greeting.version + " at the worker)");
  }
  return link;
}

void UcxLink::listen(const std::string& address) {
  sockaddr_storage where = parseAddress(address);
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&where), socketAddressBytes(where)};
  params.conn_handler = {onConnection, this};
  ucs_status_t status = ucx_.ucp_listener_create(worker_, &params, &listener_);
  if (status != UCS_OK) {
    throw std::runtime_error("ucx: cannot listen on " + address + ": " + ucx_.ucs_status_string(status));
  }
}

void UcxLink::awaitClient(int bootstrap, Deadline deadline) {
  while (!endpoint_) {
    setupStep(bootstrap, deadline, "the client did not connect");
    takeConnections();
  }
  ucx_.ucp_listener_destroy(listener_);
  listener_ = nullptr;
  for (ucp_ep_h stranger : candidates_) {
    if (stranger != endpoint_) closeEndpoint(stranger);
  }
  candidates_.clear();
  send({.kind = WireKind::welcome}, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
}

void UcxLink::awaitWelcome(int bootstrap, Deadline deadline) {
  while (!welcomed_) setupStep(bootstrap, deadline, "the worker did not answer");
}

void UcxLink::sayReady(int bootstrap, Deadline deadline) {
  char ready = 'r';
  if (!sendAll(bootstrap, &ready, 1, deadline))
    throw std::runtime_error("ucx: the worker went away during set-up");
}

void UcxLink::awaitReady(int bootstrap, Deadline deadline) {
  char ready = 0;
  while (recv(bootstrap, &ready, 1, MSG_DONTWAIT) != 1) {
    setupStep(bootstrap, deadline, "the client did not finish its set-up");
  }
}

void UcxLink::setupStep(int bootstrap, Deadline deadline, const char* what) {
  while (progress()) {
  }
  if (endpoint_ && !failure_.empty()) throw std::runtime_error("ucx: " + failure_);
  // A process that was stopped meanwhile has the time it had before: its next step may be what the peer waits
  // for.
  const Deadline now = Clock::now();
  if (lastStep_ != Deadline{} && now - lastStep_ > std::chrono::seconds(1)) stopped_ += now - lastStep_;
  lastStep_ = now;
  if (now >= deadline + stopped_) throw std::runtime_error(std::string("ucx: ") + what + " in time");
  if (!arm()) return;
  pollfd watched[2] = {{eventDescriptor_, POLLIN, 0}, {bootstrap, POLLIN, 0}};
  ::poll(watched, 2, 10);
  std::byte next;
  if (watched[1].revents && recv(bootstrap, &next, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
    throw std::runtime_error(std::string("ucx: ") + what + " (it closed its socket)");
  }
}

void UcxLink::takeConnections() {
  for (ucp_conn_request_h request : std::exchange(requests_, {})) {
    if (candidates_.size() >= kMaxCandidates) {
      ucx_.ucp_listener_reject(listener_, request);
      continue;
    }
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
    params.conn_request = request;
    candidates_.push_back(createEndpoint(params));
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
  if (!UCS_PTR_IS_PTR(result)) finish(operation, UCS_PTR_RAW_STATUS(result));
}

void UcxLink::receive(void* data, void* to, size_t bytes, Done done) {
  Operation* operation = newOperation({}, std::move(done));
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.recv_am = onReceived;
  params.user_data = operation;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  ucs_status_ptr_t result = ucx_.ucp_am_recv_data_nbx(worker_, data, to, bytes, &params);
  if (!UCS_PTR_IS_PTR(result)) finish(operation, UCS_PTR_RAW_STATUS(result));
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
