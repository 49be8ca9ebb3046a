#pragma once
// Descriptors over Unix sockets (unix(7), SCM_RIGHTS): the one place that packs and unpacks them.

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <vector>

namespace gpupool {

inline constexpr size_t kMostDescriptors = 64;  // with one message

// As sendmsg(2), without SIGPIPE and not ended by signals: the bytes sent, or -1 and errno. The descriptors
// travel with the first byte. credentials: sends the process's own, which a receiver with SO_PASSCRED gets
// checked by the kernel.
ssize_t sendWithDescriptors(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                            int flags = 0, bool credentials = false);

struct ReceivedMessage {
  ssize_t bytes = 0;             // as recvmsg(2): 0 at end-of-file, -1 with errno
  bool whole = true;             // false: a datagram was longer than the room, or more descriptors came
  std::vector<int> descriptors;  // close-on-exec; the receiver's, who closes them
  pid_t sender = 0;              // by the kernel's word, where SO_PASSCRED is set
};
// As recvmsg(2), not ended by signals. Of more than kMostDescriptors the kernel closes the rest.
ReceivedMessage receiveWithDescriptors(int socket, std::span<std::byte> room, int flags = 0);

}  // namespace gpupool
