#pragma once
// Who has the devices when leases take turns: a server that leases more memory than it has.
//
// A lease is resident (its memory is on its devices) or aside. One that is aside and wants its devices waits.
// Waiting leases are served by priority, then by virtual time, then by how long they wait. Where there is
// room for one on all its devices it is brought back; else others are put aside for it, no more than needed
// and only if that makes room: first those that have been quiet for a while, then those whose turn is over
// (also of one that seemed quiet and could not be put aside: something runs on its devices). A lease that
// cannot be served yet keeps its devices from those behind it, as long as waiting will help it. While nobody
// waits, nothing is moved.
//
// Virtual time: the time that a lease was resident while others waited for its devices, divided by its
// weight. Nobody's turn is over for one that stands higher. Who begins to want its devices stands no lower
// than the lowest of the others, so that nobody saves up time by sleeping. Who waits stands at most two turns
// above the lowest, so that nobody pays without end for a time in which he disturbed nobody. Weight: the
// share that the lease names; those that name none have equal parts of what the named ones leave.
//
// State in, moves out: no clock, no I/O, and the same history gives the same moves. One thread.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "schema/id.h"

namespace gpupool::server {

class Turns {
 public:
  using Time = std::chrono::milliseconds;  // of a clock that only goes forward

  // apart: not ours to move, since it is suspended by order. moving: on its way, whoever moves it, or ending.
  enum class Place { resident, aside, moving, apart };
  struct Part {
    size_t device = 0;
    uint64_t whole = 0;  // bytes that it takes there unless it is aside
    uint64_t left = 0;   // bytes that it takes there when it is aside, as far as that is known
  };
  struct Facts {
    Place place = Place::resident;
    bool wants = false;         // resident: it uses its devices; aside: it has something to do
    uint32_t sharePercent = 0;  // 0: none is named
    int priority = 0;           // higher goes first
    std::vector<Part> parts;
  };
  struct Move {
    Id lease;
    bool back = false;  // else it is put aside, and its devices have `drain` to finish what runs
    Time drain{0};
    bool operator==(const Move&) const = default;
  };
  // What people are told of a lease.
  struct Report {
    Place place = Place::resident;  // the last that was not `moving`
    bool wants = false;
    Time served{0};      // resident, of all its life
    uint32_t turns = 0;  // how often it has come back
    std::string note;    // why it could not be moved, lately
  };
  struct Settings {
    std::vector<uint64_t> memory;           // of each device
    Time turn{10'000};                      // at least; a multiple of what a change costs, if that is longer
    Time quiet{500};                        // a lease may be put aside after so long without work
    Time minimum{1'000};                    // of a turn that one of higher priority ends
    Time quietDrain{200}, drain{30'000};    // for a quiet lease, and for one whose turn is over
    Time firstPause{1'000}, pause{30'000};  // after a move that failed, doubling
    Time keptFor{300'000};                  // so long it is believed that a lease keeps what it kept last
  };

  explicit Turns(Settings settings);

  // All leases as they are now; one that is not there any more has ended.
  void see(const std::map<Id, Facts>& leases, Time now);
  // What to do now, after see(). Each lease that is named counts as moving until moved() or failed().
  std::vector<Move> decide(Time now);
  // took: without waiting for the devices.
  void moved(const Id& lease, bool back, Time took);
  void failed(const Id& lease, std::string why, Time now);

  // Somebody waits: decide() may say something else a little later, with no news.
  bool waiting() const;
  bool waitedFor(size_t device) const { return contests_[device].waiters != 0; }
  // As see() found it; null: it did not.
  std::optional<Report> report(const Id& lease) const;
  // For tests: how long its turn lasts now.
  Time turn(const Id& lease) const { return leases_.at(lease).turn; }

 private:
  struct Lease {
    Id id;
    Facts facts;
    Place settled = Place::apart;  // facts.place, or what it was before it was `moving`
    bool ordered = false;          // decide() named it
    Time since{0};                 // that it is there, and wants its devices or does not
    std::optional<Time> begun;     // of its turn: resident, and has wanted its devices
    bool called = false;           // others went aside for it
    bool works = false;            // it could not be put aside when it seemed quiet
    double virtualTime = 0, weight = 1;
    Time turn{0};            // so long, as things are
    double virtualTurn = 0;  // of whoever wants the same devices
    Time out{0}, in{0};      // what its last moves took
    uint32_t failures = 0;
    Time notBefore{0};           // it is not moved, because that failed
    std::vector<uint64_t> kept;  // of each part: what it left there when it was last aside
    Time keptAt{0};
    Report told;
  };
  // Those who want one device.
  struct Contest {
    uint32_t named = 0, unnamed = 0;  // percent; leases
    double smallest = 100;            // weight
    Time turn{0};                     // of the smallest weight
    size_t waiters = 0;
  };
  // On the way to a decision.
  struct Board {
    std::vector<uint64_t> used;  // bytes, by device
    std::vector<bool> moving;    // something is on its way there
    std::vector<bool> claimed;   // a lease that comes first waits for it
  };

  void advance(Time now);
  void update(Lease& lease, const Facts& facts, Time now);
  void arrive(Lease& lease, Time now);
  std::optional<double> lowestRival(const Lease& lease) const;
  void weigh();
  static double equalPart(const Contest& contest);
  bool moving(const Lease& lease) const { return lease.ordered || lease.facts.place == Place::moving; }
  bool waits(const Lease& lease) const { return lease.settled == Place::aside && lease.facts.wants; }
  Board board() const;
  std::vector<Lease*> queue(Time now);
  // Leases that make room for `waiter` now, if they all go aside, or those of them that have to be tried
  // first. Empty: there are none.
  std::vector<Lease*> victims(const Lease& waiter, const Board& board, Time now);
  // Would it get room when the turns of others have ended?
  bool hopeful(const Lease& waiter, const Board& board, Time now) const;
  bool fits(const Lease& waiter, const Board& board, const std::vector<Lease*>& without, Time now) const;
  bool idle(const Lease& lease, Time now) const;
  bool quiet(const Lease& lease, Time now) const { return !lease.works && idle(lease, now); }
  bool turnIsOver(const Lease& lease, const Lease& waiter, Time now) const;
  uint64_t freed(const Lease& lease, size_t device, Time now) const;
  Time transfer(const Lease& lease) const { return lease.in + lease.out; }

  Settings settings_;
  std::map<Id, Lease> leases_;
  std::vector<Contest> contests_;  // by device
  Time now_{0};
};

}  // namespace gpupool::server
