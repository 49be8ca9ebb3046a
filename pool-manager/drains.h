#pragma once
// Servers that are being emptied: their leases are moved to other servers, one after the other, and those
// that stay are tried again, as long as the server is cordoned. For whoever asks (Manager.drain): the
// command, REST and the page look at one and the same. The store has each that goes on (StoredDrain), so that
// a manager that is started again goes on with it: each lease is tried once at least. What was said of leases
// is not stored. One event loop's thread.

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
  static constexpr uint64_t kMostTryMs = uint64_t{31} * 86'400'000;

  // Moves the lease to any other server. Fails, or throws, with the reason why it stays.
  using Move = std::function<kj::Promise<MigrateResult>(const Principal& who, const Id& lease)>;
  // calendarMs: since 1970, for what outlives this object.
  Drains(kj::Timer& timer, Pool& pool, Move move, std::function<uint64_t()> calendarMs)
      : timer_(timer),
        pool_(pool),
        move_(std::move(move)),
        calendarMs_(std::move(calendarMs)),
        words_(calendarMs_()) {}

  // Goes on with what the store has (kDrainPrefix).
  void load(const std::vector<Entry>& stored);
  // Of a server that is cordoned: begins, or joins what is under way, and goes on until tryFor is over, of
  // several who ask the longest. Returns when it is stored and has begun; fails if it cannot be stored.
  kj::Promise<void> begin(const Principal& who, const std::string& server, kj::Duration tryFor);
  // At once no further move is begun; one that is under way goes on. Returns when the store has nothing of it
  // any more.
  kj::Promise<void> stop(const std::string& server);
  // after: DrainWord::number of the last one that is known already.
  DrainState state(const std::string& server, uint64_t after) const;

 private:
  struct Drain {
    Principal who;
    kj::TimePoint until = kj::origin<kj::TimePoint>();
    bool moving = false, goesOn = false;
    bool stored = false;             // the store may have it
    unsigned storing = 0;            // writes of it that the store has not answered
    unsigned stops = 0;              // so often it was stopped
    std::map<Id, std::string> said;  // of each lease, the last time
    std::deque<DrainWord> words;
    kj::Promise<void> task = nullptr;
  };

  bool isCordoned(const std::string& server) const { return pool_.cordons().contains(server); }
  std::vector<Id> movable(const std::string& server) const;
  void start(const Principal& who, const std::string& server, kj::Duration tryFor);
  void forget(const std::string& server, Journal::Done done);
  void forgetEnded(const std::string& server);
  kj::Promise<void> whenServersAreBack();
  kj::Promise<void> round(const std::string& server);
  kj::Promise<void> moveNext(const std::string& server, std::deque<Id> leases);
  void say(Drain& drain, const Id& lease, bool moved, const std::string& text);

  kj::Timer& timer_;
  Pool& pool_;
  Move move_;
  std::function<uint64_t()> calendarMs_;
  uint64_t words_;  // the number of the last one; from the calendar, so that no later manager begins below it
  std::map<std::string, Drain> drains_;  // by server
};

}  // namespace gpupool::pool
