#pragma once
// The reason for a session's end, sent on the bootstrap socket. A killed worker cannot send a reason, and one
// that was asked to end may not reach a busy client. So its server keeps a descriptor of the socket until the
// worker's process has ended, sends the reason, and the client prints it for its user.

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace gpupool::transport {

// How long a client that notices the worker's end waits for the reason. The server sends it when the worker's
// process has ended, which on a busy machine is a second later than the end of its connection.
inline constexpr std::chrono::milliseconds kLastWordsBound{2000};

// The reason begins with this where the server restores the session in another worker: the client asks its
// holder for the session's next epoch.
inline constexpr char kFailoverWords[] = "failover: ";

// Or with this where the lease's holder has a checkpoint of the session, and the server does not restore it:
// it is shut down, or the lease is suspended. The client asks its holder for another server.
inline constexpr char kLeavingWords[] = "leaving: ";

// The reason as people read it, without such a beginning.
std::string plainWords(std::string reason);

// Called by the server once the worker is gone, when nobody else writes. Never blocks; cuts the text to 255
// bytes.
void sayLastWords(int socket, const std::string& text);

// Reads the reason from a socket that carries nothing else but signs of life, each of them the byte
// kBeatByte.
class LastWords {
 public:
  static constexpr std::byte kBeatByte{'b'};
  void take(std::span<const std::byte> bytes);
  // Empty: no reason was sent, or not all of it has arrived.
  std::string text() const;

 private:
  std::vector<std::byte> said_;
};

}  // namespace gpupool::transport
