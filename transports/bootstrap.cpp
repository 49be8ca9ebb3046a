#include "transports/bootstrap.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/descriptor_passing.h"
#include "transports/network_address.h"
#include "transports/regions.h"

namespace gpupool::transport {

bool applyRecord(RemoteRegions& regions, const Record& record, Descriptor attached) {
  Region region{record.id, record.generation};
  if (record.kind == RecordKind::region)
    return attached && regions.announce(region, record.size, std::move(attached), nullptr);
  if (record.kind == RecordKind::file)
    return attached && regions.announce(region, record.size, std::move(attached), nullptr, record.extra);
  return record.kind == RecordKind::withdraw && regions.withdraw(region);
}

Bootstrap::Bootstrap(int socket) : socket_(socket) {
  int domain = 0, type = 0, on = 1;
  socklen_t length = sizeof(int);
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0 ||
      getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &length) != 0) {
    throw std::runtime_error(errorText("shm: bootstrap socket"));
  }
  if (domain != AF_UNIX || type != SOCK_STREAM) {
    throw std::runtime_error(
        "shm: needs a Unix stream socket between client and worker; use ucx over a network");
  }
  setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
}

bool Bootstrap::send(const Record& record, int attached, TimeLeft time) {
  std::lock_guard lock(sendMutex_);
  const auto* bytes = reinterpret_cast<const std::byte*>(&record);
  size_t sent = 0;
  while (sent < sizeof record) {
    const std::span<const int> with(&attached, sent == 0 && attached >= 0 ? 1 : 0);
    const ssize_t count = sendWithDescriptors(socket_.get(), {bytes + sent, sizeof record - sent}, with,
                                              MSG_DONTWAIT, sent == 0);
    if (count > 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == ETOOMANYREFS) {
      if (!pollFor(socket_.get(), POLLOUT, time)) return false;
    } else {
      return false;
    }
  }
  return true;
}

Bootstrap::Got Bootstrap::poll(Record& record, Descriptor& attached) {
  while (have_ < sizeof(Record)) {
    const ReceivedMessage message =
        receiveWithDescriptors(socket_.get(), std::span(partial_).subspan(have_), MSG_DONTWAIT);
    for (int descriptor : message.descriptors)
      attached_ = Descriptor(descriptor);  // a record has one: others go
    if (message.sender != 0) peerProcess_ = message.sender;
    if (message.bytes < 0 && errno == EAGAIN) return Got::nothing;
    if (message.bytes <= 0) return Got::end;
    have_ += static_cast<size_t>(message.bytes);
  }
  std::memcpy(&record, partial_.data(), sizeof record);
  attached = std::move(attached_);
  attached_ = Descriptor();
  have_ = 0;
  return Got::record;
}

size_t Bootstrap::read(std::span<std::byte> bytes) {
  const ssize_t count = recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  return count > 0 ? static_cast<size_t>(count) : 0;
}

bool Bootstrap::receive(Record& record, Descriptor& attached, TimeLeft time) {
  for (;;) {
    switch (poll(record, attached)) {
      case Got::record:
        return true;
      case Got::end:
        return false;
      case Got::nothing:
        break;
    }
    if (!pollFor(socket_.get(), POLLIN, time)) return false;
  }
}

}  // namespace gpupool::transport
