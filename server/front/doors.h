#pragma once
// Doors: sockets by which the next life of this server reaches the workers of this one. Each is a datagram
// socket with a name in a folder of the server's state folder, on which the worker receives and cannot send.
// Who may use the folder, the server's user alone, may knock.
//
// A door is named after its worker's process: what the server notes of that (server_state.h) is enough to
// find it. Belongs to the event loop's thread.

#include <kj/io.h>
#include <kj/memory.h>
#include <sys/types.h>

#include <cstddef>
#include <set>
#include <span>
#include <string>

namespace gpupool::server {

class Doors {
 public:
  // folder: made where it is wanted, 0700; empty: there are none.
  explicit Doors(std::string folder) : folder_(std::move(folder)) {}

  // The worker's socket. None, and the log says why, where there can be none.
  kj::AutoCloseFd make(pid_t worker) const;
  // Removes the door's name when it is destroyed.
  kj::Own<void> nameOf(pid_t worker) const;
  // Sends the bytes with a descriptor to the worker's door. The error: errno; 0: done.
  int knock(pid_t worker, std::span<const std::byte> bytes, int descriptor) const;
  // The folder; there are no doors any more.
  void remove() const;
  // Of workers that are no more.
  void sweep(const std::set<pid_t>& but) const;

 private:
  kj::AutoCloseFd openFolder() const;

  std::string folder_;
};

}  // namespace gpupool::server
