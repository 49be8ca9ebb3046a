#pragma once
// Parts of contents that come on a state socket, compared with their checksums by several threads beside the
// caller's, which takes the next ones meanwhile: it gets those that are compared in their order. Of a part
// that lies in pages (ReceivedPart), several are compared at a time.
//
//   while (more || !parts.empty()) {
//     if (more && !parts.full()) {
//       if (!parts.receive(roomOf(parts.next()))) return socket.error();
//     } else {
//       if (std::string why = parts.await(); !why.empty()) return why;
//       use(parts.bytes());
//       if (!parts.drop()) return socket.error();
//     }
//   }
//
// Belongs to the thread of its socket.

#include <array>

#include "base/ordered_work.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

class PartReceiver {
 public:
  // placed: shared parts stay where they are. copied: they are in the caller's room, and it is that copy
  // which was compared.
  enum Where { placed, copied };
  // So many parts at a time, at most (StateSocket::partsAtOnce), by so many threads.
  PartReceiver(StateSocket& socket, size_t most, size_t threads, Where where);

  bool full() const { return comparing_.full(); }
  bool empty() const { return comparing_.empty(); }
  size_t parts() const { return parts_.size(); }
  // Which of them the next one is, and the oldest: from 0 to parts() - 1, in turns.
  size_t next() const { return comparing_.next(); }
  size_t oldest() const { return comparing_.oldest(); }
  // The next one, which is as long as the room; that is the part's until it is dropped. Not while full.
  // False: the socket's error.
  bool receive(std::span<std::byte> room);
  // Until the oldest one is compared: "" or that it is another one than was sent. Not while empty.
  std::string await();
  std::span<std::byte> bytes() const { return parts_[comparing_.oldest()].bytes; }  // the oldest one's
  // Gives its place back. False: the socket's error.
  bool drop();

 private:
  struct Part {
    ReceivedPart came;
    std::span<std::byte> bytes;  // that are compared
    size_t pages = 0;            // that are compared apart
    std::array<Checksum, StateSocket::kPartBytes / kPageBytes> checksums;
  };
  void compare(Part& part, size_t page) const;

  StateSocket& socket_;
  const Where where_;
  std::vector<Part> parts_;
  OrderedWork comparing_;  // ends first
};

}  // namespace gpupool::server
