#pragma once
// Further TCP connections between the two workers of a stream that goes from one machine to another
// (state_socket.h): device memory travels over all of them at a time. One connection alone, which one core
// serves at either end, does not fill a fast wire.
//
//   receiver -> sender   Offer: it listens for a moment, at the address at which the stream has come to it,
//   on
//                        a port that the system chooses
//   sender -> receiver   on each connection that it has made: Greeting, with the connection's number
//                        on the stream: 8 bytes: how many there are, numbered from 0
//   receiver -> sender   8 bytes: bit n: it has number n. Both forget the others
//
// Fewer than were offered, or none, is no error: where something between the two lets nothing but the
// server's port through, the stream carries all.
//
// Belongs to the thread of the stream, but for what `together` runs.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/worker/state_socket.h"

namespace gpupool::server {

class ParallelSockets {
 public:
  using Secret = std::array<std::byte, 16>;
  struct Offer {
    uint16_t port = 0, most = 0;
    uint32_t reserved = 0;
    Secret secret{};
  };
  struct Greeting {
    static constexpr uint64_t kMagic = 0x6c65'6c6c'6172'6170;
    uint64_t magic = kMagic;
    uint64_t number = 0;
    Secret secret{};
  };
  // With one share of the work, on the socket that is its own. "" or why it has failed.
  using Work = std::function<std::string(StateSocket& socket, size_t share)>;

  // How many, beside the stream, the cores of this machine can serve. The smaller number of both ends counts.
  static unsigned wanted();
  // Instead of that: tests.
  static void want(unsigned connections);

  explicit ParallelSockets(std::function<bool()> stopping) : stopping_(std::move(stopping)) {}

  // The receiver. offer, once: to a sender that can use so many; none: it cannot listen. accept, when the
  // sender has the offer: takes what comes within `kComes`, and says what. False: the stream's error.
  std::optional<Offer> offer(const StateSocket& stream, unsigned most);
  bool accept(StateSocket& stream);
  // The sender. False: the stream's error.
  bool connect(StateSocket& stream, const Offer& offer);
  // Whether an offer was asked for, or made.
  bool asked() const { return asked_; }
  void ask() { asked_ = true; }

  size_t shares() const { return sockets_.size() + 1; }
  // So many shares, at most shares(), each on a thread of its own; 0 is the stream's, on the caller's. When
  // one fails the others end, as they do at the other end. "" or why the first one failed.
  std::string together(StateSocket& stream, size_t shares, const Work& work);
  void close() { sockets_.clear(); }

  static constexpr std::chrono::seconds kComes{2};

 private:
  using Sockets = std::map<uint64_t, std::unique_ptr<StateSocket>>;  // by number
  bool connectOne(const StateSocket& stream, const Offer& offer, Sockets& made,
                  std::chrono::milliseconds time);
  void take(Sockets& from, uint64_t numbers);

  std::function<bool()> stopping_;
  std::vector<std::unique_ptr<StateSocket>> sockets_;
  Descriptor listener_;
  Offer offered_;
  bool asked_ = false;
};

}  // namespace gpupool::server
