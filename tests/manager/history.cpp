// Manager histories: many seeds of world.h, or one again.
//
//   manager_history                              10,000 histories, and some with a planted bug
//   manager_history --first 10001 --runs 1000000 more, from another seed on
//   manager_history --seed 17                    one, with the manager's log

#include <stdlib.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/log.h"
#include "tests/manager/world.h"

using namespace gpupool::history;

namespace {

constexpr uint64_t kPlantedRuns = 6000;

// The first seed at which the checker finds the bug; 0: at none.
uint64_t firstFound(Bug bug, std::string* fault) {
  for (uint64_t seed = 1; seed <= kPlantedRuns; ++seed)
    if (const Result result = runHistory(seed, bug); !result.fault.empty()) {
      *fault = result.fault;
      return seed;
    }
  return 0;
}

bool findsPlantedBugs() {
  const struct {
    Bug bug;
    const char* name;
  } bugs[] = {{Bug::countsGaps, "a clock that counts the manager's own gaps"},
              {Bug::believesRevoke, "a server that confirms an end before it"},
              {Bug::hidesWorkers, "a restarted server that hides its old workers"},
              {Bug::forgetsStore, "a disk that loses what it accepted"},
              {Bug::earlySuspends, "a server that says that a lease is suspended before its memory is gone"},
              {Bug::hidesResuming, "a beat that says of a lease that is being resumed that it is suspended"},
              {Bug::overstates, "a server that says that it overcommits more than it does"},
              {Bug::hidesContexts, "a server that says of real GPUs that they are software GPUs"},
              {Bug::losesCordons, "a disk that loses that servers are cordoned"},
              {Bug::hidesSessions, "a server that says that no session has moved to it"},
              {Bug::setsCalendar, "a calendar that is set forward"},
              {Bug::keepsDevices, "a server that keeps the devices that a lease has left"},
              {Bug::earlyHolds, "a server that says that a lease is held before its sessions have left"},
              {Bug::forgetsHolds, "a disk that loses that leases are held"},
              {Bug::hidesReturns, "a restarted server that does not say with which leases it goes on"}};
  bool all = true;
  for (const auto& one : bugs) {
    std::string fault;
    const uint64_t seed = firstFound(one.bug, &fault);
    all = all && seed != 0;
    if (seed != 0)
      std::printf("planted: %s: found with seed %llu: %s\n", one.name, static_cast<unsigned long long>(seed),
                  fault.c_str());
    else
      std::printf("planted: %s: NOT FOUND in %llu histories\n", one.name,
                  static_cast<unsigned long long>(kPlantedRuns));
  }
  return all;
}

void add(Result& sum, const Result& one) {
  sum.leases += one.leases, sum.restarts += one.restarts, sum.stalls += one.stalls, sum.kills += one.kills;
  sum.partitions += one.partitions, sum.fullDisks += one.fullDisks, sum.lostStores += one.lostStores;
  sum.twins += one.twins, sum.suspends += one.suspends, sum.resumes += one.resumes;
  sum.crowded += one.crowded, sum.cordons += one.cordons, sum.migrations += one.migrations;
  sum.arrivals += one.arrivals, sum.ordered += one.ordered, sum.limited += one.limited;
  sum.checkpoints += one.checkpoints, sum.adoptions += one.adoptions, sum.unused += one.unused;
  sum.holds += one.holds, sum.restores += one.restores;
  sum.readopted += one.readopted;
  sum.preempted += one.preempted, sum.noticed += one.noticed;
}

}  // namespace

int main(int count, char** words) {
  uint64_t runs = 10'000, first = 1;
  bool one = false;
  for (int i = 1; i + 1 < count; i += 2) {
    if (std::strcmp(words[i], "--runs") == 0) runs = std::strtoull(words[i + 1], nullptr, 10);
    if (std::strcmp(words[i], "--first") == 0) first = std::strtoull(words[i + 1], nullptr, 10);
    if (std::strcmp(words[i], "--seed") == 0)
      one = true, runs = 1, first = std::strtoull(words[i + 1], nullptr, 10);
  }
  if (!one) gpupool::log::setDescriptor(-1);  // faults are what it is all about
  const auto begin = std::chrono::steady_clock::now();
  Result sum;
  uint64_t faults = 0;
  for (uint64_t seed = first; seed < first + runs && faults < 10; ++seed) {
    const Result result = runHistory(seed);
    add(sum, result);
    if (result.fault.empty()) continue;
    ++faults;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), result.fault.c_str());
  }
  const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf(
      "%llu histories, %llu leases (%llu that take turns), %llu manager restarts, %llu stalls, %llu servers "
      "killed, %llu "
      "partitions, "
      "%llu full disks, %llu lost stores, %llu twin servers, %llu suspensions, %llu resumptions, "
      "%llu cordons, %llu moves (%llu sessions to other GPUs), %llu leases that could have overtaken, %llu "
      "ended by their time limit, %llu checkpoints, %llu leases held in files, %llu restored, %llu adoptions "
      "of "
      "claims, %llu claims that nobody used, %llu leases preempted, %llu by notice, %llu with which a "
      "restarted server went on: "
      "%llu "
      "faults, in %.1f s\n",
      number(runs), number(sum.leases), number(sum.crowded), number(sum.restarts), number(sum.stalls),
      number(sum.kills), number(sum.partitions), number(sum.fullDisks), number(sum.lostStores),
      number(sum.twins), number(sum.suspends), number(sum.resumes), number(sum.cordons),
      number(sum.migrations), number(sum.arrivals), number(sum.ordered), number(sum.limited),
      number(sum.checkpoints), number(sum.holds), number(sum.restores), number(sum.adoptions),
      number(sum.unused), number(sum.preempted), number(sum.noticed), number(sum.readopted), number(faults),
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return faults == 0 && (one || findsPlantedBugs()) ? 0 : 1;
}
