#pragma once
// Leases that take turns, with a clock of their own.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/front/turns.h"

namespace gpupool::server::test {

using Place = Turns::Place;
using Time = Turns::Time;

inline constexpr Time kTick{100};

// Leases that do what they are told at once, unless a test says otherwise.
struct World {
  Turns turns;
  std::map<Id, Turns::Facts> leases;
  Time now{0};
  std::map<Id, std::string> failures;  // of those that do not go aside
  std::map<Id, Time> took;
  std::vector<std::string> moves;  // "2 aside at 1000"
  std::vector<Turns::Move> latest;

  explicit World(const std::vector<uint64_t>& memory = {100}) : turns(settings(memory)) {}
  static Turns::Settings settings(std::vector<uint64_t> memory) {
    Turns::Settings settings;
    settings.memory = std::move(memory);
    return settings;
  }
  static Id id(uint64_t number) { return {0, number}; }
  Turns::Facts& operator[](uint64_t number) { return leases.at(id(number)); }
  void add(uint64_t number, Place place, uint64_t bytes, bool wants = true, uint32_t share = 0,
           int priority = 0) {
    leases[id(number)] = {place, wants, share, priority, {{0, bytes, 0}}};
  }
  // One decision, carried out.
  void step() {
    turns.see(leases, now);
    latest = turns.decide(now);
    for (const auto& move : latest) {
      if (!move.back && failures.contains(move.lease)) {
        turns.failed(move.lease, failures[move.lease], now);
        moves.push_back(std::to_string(move.lease.low) + " stays at " + std::to_string(now.count()));
        continue;
      }
      leases[move.lease].place = move.back ? Place::resident : Place::aside;
      turns.moved(move.lease, move.back, took[move.lease]);
      moves.push_back(std::to_string(move.lease.low) + (move.back ? " back at " : " aside at ") +
                      std::to_string(now.count()));
    }
  }
  // Until nothing more happens at this moment.
  void settle() {
    do step();
    while (!latest.empty());
  }
  void run(Time time) {
    for (const Time end = now + time; now < end; now += kTick) settle();
  }
  std::vector<std::string> takeMoves() { return std::exchange(moves, {}); }
};

}  // namespace gpupool::server::test
