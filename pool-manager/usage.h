#pragma once
// How much of the pool each tenant has used: device-seconds (a part of a device's memory counts as that part
// of a device), of which half is forgotten in every half-life. Who has used least for its weight is served
// first. Times are those of the pool's clock, in milliseconds; in the store they are since 1970. One thread.

#include <map>
#include <string>
#include <vector>

#include "pool-manager/store/store.h"

namespace gpupool::pool {

inline const std::string kUsagePrefix = "usage/";

class Usage {
 public:
  // weights: by tenant; those that are not named have 1.
  Usage(uint64_t halfLifeMs, std::map<std::string, double> weights)
      : halfLifeMs_(halfLifeMs), weights_(std::move(weights)) {}
  // What is no usage is left out.
  void load(const std::vector<Entry>& stored, uint64_t nowMs, uint64_t calendarMs);

  void charge(const std::string& tenant, double deviceSeconds, uint64_t nowMs);
  double deviceSeconds(const std::string& tenant, uint64_t nowMs) const;
  // Divided by the tenant's weight.
  double share(const std::string& tenant, uint64_t nowMs) const;

  // What has changed since the last time; what is next to nothing is forgotten.
  std::vector<Write> changes(uint64_t nowMs, uint64_t calendarMs);

 private:
  struct Account {
    double deviceSeconds = 0;
    uint64_t atMs = 0;
    bool changed = false;
  };
  double decayed(const Account& account, uint64_t nowMs) const;
  uint64_t halfLifeMs_;
  std::map<std::string, double> weights_;
  std::map<std::string, Account> accounts_;
};

// "alice=2,bob=0.5". Throws std::invalid_argument.
std::map<std::string, double> parseWeights(const std::string& text);

}  // namespace gpupool::pool
