#pragma once
// Servers that are being emptied: their leases are moved to other servers, one after the other, and those
// that stay are tried again, as long as the server is cordoned. For whoever asks (Manager.drain): the
// command, REST and the page look at one and the same. Nothing of it is stored: after a restart of the
// manager the server is cordoned, and who wants it emptied asks again. One event loop's thread.

#include <kj/async.h>
#include <kj/timer.h>

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "pool-manager/drain_state.h"
#include "pool-manager/pool.h"

namespace gpupool::pool {

class Drains {
 public:
  static constexpr kj::Duration kBetween = 1 * kj::MINUTES;  // those that stay are tried again after this

  // Moves the lease to any other server. Fails, or throws, with the reason why it stays.
  using Move = std::function<kj::Promise<MigrateResult>(const Principal& who, const Id& lease)>;
  Drains(kj::Timer& timer, const Pool& pool, Move move)
      : timer_(timer), pool_(pool), move_(std::move(move)) {}

  // Of a server that is cordoned: begins at once, or joins what is under way, and goes on until tryFor is
  // over, of several who ask the longest.
  void begin(const Principal& who, const std::string& server, kj::Duration tryFor);
  // No further move is begun; one that is under way goes on.
  void stop(const std::string& server);
  // after: DrainWord::number of the last one that is known already.
  DrainState state(const std::string& server, uint64_t after) const;

 private:
  struct Drain {
    Principal who;
    kj::TimePoint until = kj::origin<kj::TimePoint>();
    bool moving = false, goesOn = false;
    std::map<Id, std::string> said;  // of each lease, the last time
    std::deque<DrainWord> words;
    kj::Promise<void> task = nullptr;
  };

  bool isCordoned(const std::string& server) const { return pool_.cordons().contains(server); }
  std::vector<Id> movable(const std::string& server) const;
  kj::Promise<void> round(const std::string& server);
  kj::Promise<void> moveNext(const std::string& server, std::deque<Id> leases);
  void say(Drain& drain, const Id& lease, bool moved, const std::string& text);

  kj::Timer& timer_;
  const Pool& pool_;
  Move move_;
  uint64_t words_ = 0;
  std::map<std::string, Drain> drains_;  // by server
};

}  // namespace gpupool::pool
