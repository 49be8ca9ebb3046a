#pragma once
// The last words on a session's bootstrap socket. A worker that is killed says nothing, and one that ends by
// order may not get through to a busy client. Its server, which keeps a descriptor of the socket until the
// worker's process is gone, says why it is, and the client tells its user.

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace gpupool::transport {

// How long a client that sees the worker's end waits for them: the server sees it at the same time.
inline constexpr std::chrono::milliseconds kLastWordsBound{500};

// The server, once the worker is gone: nobody else writes then. Never blocks; cut to 255 bytes.
void sayLastWords(int socket, const std::string& text);

// What came on a socket that carries nothing else but signs of life, each of them the byte kBeatByte.
class LastWords {
 public:
  static constexpr std::byte kBeatByte{'b'};
  void take(std::span<const std::byte> bytes);
  // Empty: none were said, or not all of it has arrived.
  std::string text() const;

 private:
  std::vector<std::byte> said_;
};

}  // namespace gpupool::transport
