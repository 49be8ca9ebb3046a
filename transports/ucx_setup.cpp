// How the two ends of a UcxLink find each other over the bootstrap socket.

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <cstring>
#include <stdexcept>

#include "base/log.h"
#include "base/signals.h"
#include "transports/network_address.h"
#include "transports/ucx_link.h"

namespace gpupool::transport {

namespace {

constexpr uint64_t kMagic = 0x58'43'55'4c'4f'4f'50'47;
constexpr uint32_t kUcxProtocol = 2;
constexpr size_t kMaxCandidates = 8;

void receiveGreeting(int bootstrap, UcxGreeting& greeting, TimeLeft& time) {
  if (!receiveAll(bootstrap, &greeting, sizeof greeting, time)) {
    throw std::runtime_error("ucx: no greeting from the worker");
  }
  if (greeting.magic != kMagic || greeting.protocol != kUcxProtocol ||
      greeting.addressBytes > sizeof greeting.address) {
    throw std::runtime_error("ucx: the worker speaks another version of the transport");
  }
}

sockaddr_storage targetOf(const UcxGreeting& greeting, int bootstrap) {
  sockaddr_storage target{};
  std::memcpy(&target, greeting.address, greeting.addressBytes);
  completeAddress(target, bootstrap);
  return target;
}

}  // namespace

// --- the worker ---

std::unique_ptr<UcxLink> UcxLink::accept(int bootstrap, const Options& options, UcxGreeting& greeting) {
  SignalsBlocked quiet;
  TimeLeft time(options.setupTimeout);
  std::string address = options.bindAddress.empty() ? localAddress(bootstrap) : options.bindAddress;
  UcxWire wire = bestWire(options, interfaceOf(address));
  std::unique_ptr<UcxLink> link = listening(options, wire, address);
  link->greet(bootstrap, greeting, time);
  if (link->rdma()) {
    char answer = 0;
    if (!receiveAll(bootstrap, &answer, 1, time))
      throw std::runtime_error("ucx: the client went away during set-up");
    if (answer != 'y') {
      if (options.wire == NetworkWire::rdma)
        throw std::runtime_error("ucx: the client cannot use RDMA towards " + address);
      link = listening(options, tcpWire(options, interfaceOf(address)), address);
      link->greet(bootstrap, greeting, time);
    }
  }
  link->awaitClient(bootstrap, time);
  return link;
}

// Where RDMA is only the better way, one that cannot be set up is not the end.
std::unique_ptr<UcxLink> UcxLink::listening(const Options& options, const UcxWire& wire,
                                            const std::string& address) {
  try {
    std::unique_ptr<UcxLink> link(new UcxLink(options, wire, true));
    link->listen(address);
    return link;
  } catch (const std::exception& error) {
    if (!wire.rdma || options.wire == NetworkWire::rdma) throw;
    GPUPOOL_WARNING("%s (over RDMA device %s); this session goes over tcp", error.what(),
                    wire.device.c_str());
  }
  return listening(options, tcpWire(options, interfaceOf(address)), address);
}

void UcxLink::greet(int bootstrap, UcxGreeting& greeting, TimeLeft& time) {
  greeting.magic = kMagic;
  strncpy(greeting.version, ucx_.ucp_get_version_string(), sizeof greeting.version - 1);
  greeting.protocol = kUcxProtocol;
  greeting.rdma = rdma() ? 1 : 0;
  if (getrandom(greeting.nonce, sizeof greeting.nonce, 0) != sizeof greeting.nonce) {
    throw std::runtime_error(errorText("ucx: getrandom"));
  }
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  check(ucx_.ucp_listener_query(listener_, &attributes), "tell the listener's port");
  greeting.addressBytes = socketAddressBytes(attributes.sockaddr);
  std::memcpy(greeting.address, &attributes.sockaddr, greeting.addressBytes);
  std::memcpy(nonce_, greeting.nonce, sizeof nonce_);
  if (!sendAll(bootstrap, &greeting, sizeof greeting, time)) {
    throw std::runtime_error("ucx: the client went away during set-up");
  }
}

// --- the client ---

std::unique_ptr<UcxLink> UcxLink::connect(int bootstrap, const Options& options, UcxGreeting& greeting) {
  SignalsBlocked quiet;
  TimeLeft time(options.setupTimeout);
  receiveGreeting(bootstrap, greeting, time);
  sockaddr_storage target = targetOf(greeting, bootstrap);
  std::unique_ptr<UcxLink> link;
  if (greeting.rdma) {
    link = takeOffer(bootstrap, options, greeting, target, time);
  } else if (options.wire == NetworkWire::rdma) {
    throw std::runtime_error("ucx: RDMA was asked for, and the worker does not offer it");
  }
  if (!link) {
    UcxWire wire = tcpWire(options, interfaceTowards(bootstrap, target));
    link.reset(new UcxLink(options, wire, false));
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&target), socketAddressBytes(target)};
  link->endpoint_ = link->createEndpoint(params);
  WireHeader hello{.kind = WireKind::hello, .number = greeting.nonce[0], .offset = greeting.nonce[1]};
  link->send(hello, nullptr, 0, UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY, {});
  try {
    link->awaitWelcome(bootstrap, time);
  } catch (const std::exception& error) {
    greeting.version[sizeof greeting.version - 1] = 0;
    throw std::runtime_error(
        error.what() + std::string(" (UCX ") + link->ucx_.ucp_get_version_string() + " here, " +
        greeting.version + " at the worker" +
        (greeting.rdma ? ", over RDMA: the server's --network-wire tcp does without)" : ")"));
  }
  return link;
}

// Null: RDMA is not to be had on this side. Then the worker has greeted once more, with TCP.
std::unique_ptr<UcxLink> UcxLink::takeOffer(int bootstrap, const Options& options, UcxGreeting& greeting,
                                            sockaddr_storage& target, TimeLeft& time) {
  std::unique_ptr<UcxLink> link;
  UcxWire wire = bestWire(options, interfaceTowards(bootstrap, target));
  try {
    if (wire.rdma) link.reset(new UcxLink(options, wire, false));
  } catch (const std::exception& error) {
    if (options.wire == NetworkWire::rdma) throw;
    GPUPOOL_WARNING("%s (over RDMA device %s); this session goes over tcp", error.what(),
                    wire.device.c_str());
  }
  char answer = link ? 'y' : 'n';
  if (!sendAll(bootstrap, &answer, 1, time))
    throw std::runtime_error("ucx: the worker went away during set-up");
  if (link) return link;
  receiveGreeting(bootstrap, greeting, time);
  if (greeting.rdma) throw std::runtime_error("ucx: the worker insists on RDMA");
  target = targetOf(greeting, bootstrap);
  return nullptr;
}

// --- both ---

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

void UcxLink::awaitClient(int bootstrap, TimeLeft& time) {
  while (!endpoint_) {
    setupStep(bootstrap, time, "the client did not connect");
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

void UcxLink::awaitWelcome(int bootstrap, TimeLeft& time) {
  while (!welcomed_) setupStep(bootstrap, time, "the worker did not answer");
}

void UcxLink::sayReady(int bootstrap, TimeLeft& time) {
  char ready = 'r';
  if (!sendAll(bootstrap, &ready, 1, time))
    throw std::runtime_error("ucx: the worker went away during set-up");
}

void UcxLink::awaitReady(int bootstrap, TimeLeft& time) {
  for (char ready = 0; recv(bootstrap, &ready, 1, MSG_DONTWAIT) != 1;)
    setupStep(bootstrap, time, "the client did not finish its set-up");
}

void UcxLink::setupStep(int bootstrap, TimeLeft& time, const char* what) {
  while (progress()) {
  }
  if (endpoint_ && !failure_.empty()) throw std::runtime_error("ucx: " + failure_);
  if (!time.any()) throw std::runtime_error(std::string("ucx: ") + what + " in time");
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

}  // namespace gpupool::transport
