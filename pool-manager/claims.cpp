#include "pool-manager/claims.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "base/hmac.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostJob = 112, kMostDigits = 18;

bool isPart(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char one) {
    return std::isalnum(one) != 0 || std::strchr("_.+-", one) != nullptr;
  });
}

bool isNumber(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

std::vector<std::string> partsOf(const std::string& job) {
  std::vector<std::string> parts(1);
  for (const char one : job)
    if (one == ':')
      parts.emplace_back();
    else
      parts.back() += one;
  return parts;
}

}  // namespace

void checkJob(const std::string& job) {
  const auto parts = partsOf(job);
  const bool timed = parts.size() == 4;
  if (job.size() <= kMostJob && (parts.size() == 3 || timed) && isPart(parts[0]) && isPart(parts[1]) &&
      isNumber(parts[2]) && (!timed || (isNumber(parts[3]) && parts[3].size() <= kMostDigits)))
    return;
  throw std::invalid_argument(
      "a job is named CLUSTER:ID:RESTARTS or CLUSTER:ID:RESTARTS:SUBMITTED, for example alps:4711:0, of "
      "letters, digits and _.+- , in at most " +
      std::to_string(kMostJob) + " bytes; SUBMITTED has at most " + std::to_string(kMostDigits) + " digits");
}

std::string numberOf(const std::string& job) {
  const auto parts = partsOf(job);
  return parts.size() == 4 ? job.substr(0, job.rfind(':')) : job;
}

uint64_t submittedAt(const std::string& job) {
  const auto parts = partsOf(job);
  return parts.size() == 4 ? std::strtoull(parts[3].c_str(), nullptr, 10) : 0;
}

Id claimId(const std::string& tenant, const std::string& job) {
  const std::string text = "gpupool claim" + std::string(1, '\0') + tenant + std::string(1, '\0') + job;
  const Digest digest = sha256(std::as_bytes(std::span(text)));
  Id id;
  std::memcpy(&id.high, digest.data(), sizeof id.high);
  std::memcpy(&id.low, digest.data() + sizeof id.high, sizeof id.low);
  return id;
}

}  // namespace gpupool::pool
