#include "transports/bootstrap.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "transports/network_address.h"
#include "transports/regions.h"

namespace gpupool::transport {

bool applyRecord(RemoteRegions& regions, const Record& record, Descriptor attached) {
  Region region{record.id, record.generation};
  if (record.kind == RecordKind::region)
    return attached && regions.announce(region, record.size, std::move(attached), nullptr);
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
    iovec piece{const_cast<std::byte*>(bytes + sent), sizeof record - sent};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(ucred))] = {};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (sent == 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sizeof(ucred)) + (attached >= 0 ? CMSG_SPACE(sizeof(int)) : 0);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_CREDENTIALS;
      header->cmsg_len = CMSG_LEN(sizeof(ucred));
      ucred self{getpid(), getuid(), getgid()};
      std::memcpy(CMSG_DATA(header), &self, sizeof self);
      if (attached >= 0) {
        header = CMSG_NXTHDR(&message, header);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &attached, sizeof attached);
      }
    }
    ssize_t count = sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == ETOOMANYREFS) {
      if (!pollFor(socket_.get(), POLLOUT, time)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void Bootstrap::takeControl(msghdr& message) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET) continue;
    if (header->cmsg_type == SCM_CREDENTIALS && header->cmsg_len >= CMSG_LEN(sizeof(ucred))) {
      ucred sender;
      std::memcpy(&sender, CMSG_DATA(header), sizeof sender);
      peerProcess_ = sender.pid;
    } else if (header->cmsg_type == SCM_RIGHTS) {
      size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int received;
        std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof received);
        attached_ = Descriptor(received);  // a record has one: any more are closed here
      }
    }
  }
}

Bootstrap::Got Bootstrap::poll(Record& record, Descriptor& attached) {
  while (have_ < sizeof(Record)) {
    iovec piece{partial_.data() + have_, sizeof(Record) - have_};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int)) + CMSG_SPACE(sizeof(ucred))];
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t count = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return Got::nothing;
    if (count <= 0) return Got::end;
    takeControl(message);
    have_ += static_cast<size_t>(count);
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
