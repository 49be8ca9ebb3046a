#include "base/descriptor_passing.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace gpupool {
namespace {

constexpr size_t kRoom = CMSG_SPACE(kMostDescriptors * sizeof(int)) + CMSG_SPACE(sizeof(ucred));

void add(msghdr& message, int type, const void* data, size_t bytes) {
  auto* header = reinterpret_cast<cmsghdr*>(static_cast<char*>(message.msg_control) + message.msg_controllen);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = type;
  header->cmsg_len = CMSG_LEN(bytes);
  std::memcpy(CMSG_DATA(header), data, bytes);
  message.msg_controllen += CMSG_SPACE(bytes);
}

}  // namespace

ssize_t sendWithDescriptors(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                            int flags, bool credentials) {
  if (descriptors.size() > kMostDescriptors) {
    errno = EINVAL;
    return -1;
  }
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[kRoom] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  if (credentials) {
    const ucred self{getpid(), getuid(), getgid()};
    add(message, SCM_CREDENTIALS, &self, sizeof self);
  }
  if (!descriptors.empty()) add(message, SCM_RIGHTS, descriptors.data(), descriptors.size_bytes());
  if (message.msg_controllen == 0) message.msg_control = nullptr;
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

ReceivedMessage receiveWithDescriptors(int socket, std::span<std::byte> room, int flags) {
  ReceivedMessage received;
  iovec part{room.data(), room.size()};
  alignas(cmsghdr) char control[kRoom];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  do {
    received.bytes = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  } while (received.bytes < 0 && errno == EINTR);
  if (received.bytes < 0) return received;
  received.whole = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET) continue;
    const size_t bytes = header->cmsg_len - CMSG_LEN(0);
    if (header->cmsg_type == SCM_CREDENTIALS && bytes >= sizeof(ucred)) {
      ucred sender;
      std::memcpy(&sender, CMSG_DATA(header), sizeof sender);
      received.sender = sender.pid;
    } else if (header->cmsg_type == SCM_RIGHTS) {
      const size_t before = received.descriptors.size(), count = bytes / sizeof(int);
      received.descriptors.resize(before + count);
      std::memcpy(received.descriptors.data() + before, CMSG_DATA(header), count * sizeof(int));
    }
  }
  return received;
}

}  // namespace gpupool
