#include "pool-manager/usage.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace gpupool::pool {
namespace {

constexpr double kNothing = 0.01;  // device-seconds
constexpr double kLeastWeight = 0.001, kMostWeight = 1000;

// What `age` leaves of 1.
double remains(uint64_t ageMs, uint64_t halfLifeMs) {
  return halfLifeMs == 0 ? 1 : std::exp2(-static_cast<double>(ageMs) / static_cast<double>(halfLifeMs));
}

}  // namespace

double Usage::decayed(const Account& account, uint64_t nowMs) const {
  return account.deviceSeconds * remains(nowMs - std::min(nowMs, account.atMs), halfLifeMs_);
}

void Usage::load(const std::vector<Entry>& stored, uint64_t nowMs, uint64_t calendarMs) {
  for (const Entry& entry : stored) {
    double deviceSeconds = 0;
    unsigned long long thenMs = 0;
    if (std::sscanf(entry.value.c_str(), "%lf %llu", &deviceSeconds, &thenMs) != 2) continue;
    if (!std::isfinite(deviceSeconds) || deviceSeconds < 0) continue;
    const uint64_t ageMs = calendarMs - std::min<uint64_t>(calendarMs, thenMs);
    accounts_[entry.key.substr(kUsagePrefix.size())] = {deviceSeconds * remains(ageMs, halfLifeMs_), nowMs};
  }
}

void Usage::charge(const std::string& tenant, double deviceSeconds, uint64_t nowMs) {
  Account& account = accounts_[tenant];
  account = {decayed(account, nowMs) + deviceSeconds, nowMs, true};
}

double Usage::deviceSeconds(const std::string& tenant, uint64_t nowMs) const {
  const auto at = accounts_.find(tenant);
  return at == accounts_.end() ? 0 : decayed(at->second, nowMs);
}

double Usage::share(const std::string& tenant, uint64_t nowMs) const {
  const auto weight = weights_.find(tenant);
  return deviceSeconds(tenant, nowMs) / (weight == weights_.end() ? 1 : weight->second);
}

std::vector<Write> Usage::changes(uint64_t nowMs, uint64_t calendarMs) {
  std::vector<Write> writes;
  for (auto at = accounts_.begin(); at != accounts_.end();) {
    auto& [tenant, account] = *at;
    const double left = decayed(account, nowMs);
    const bool nothing = left < kNothing;
    if (nothing)
      writes.push_back({kUsagePrefix + tenant, std::nullopt});
    else if (account.changed)
      writes.push_back({kUsagePrefix + tenant, std::to_string(left) + " " + std::to_string(calendarMs)});
    account.changed = false;
    at = nothing ? accounts_.erase(at) : std::next(at);
  }
  return writes;
}

std::map<std::string, double> parseWeights(const std::string& text) {
  std::map<std::string, double> weights;
  for (size_t from = 0; from < text.size();) {
    const size_t comma = std::min(text.find(',', from), text.size());
    const std::string one = text.substr(from, comma - from);
    const size_t sign = one.rfind('=');
    size_t end = 0;
    double weight = 0;
    try {
      if (sign != std::string::npos) weight = std::stod(one.substr(sign + 1), &end);
    } catch (const std::exception&) {
      end = 0;
    }
    if (sign == std::string::npos || sign == 0 || end != one.size() - sign - 1 ||
        !(weight >= kLeastWeight && weight <= kMostWeight))
      throw std::invalid_argument("'" + one + "' is no tenant's weight (example: alice=2,bob=0.5)");
    weights[one.substr(0, sign)] = weight;
    from = comma + 1;
  }
  return weights;
}

}  // namespace gpupool::pool
