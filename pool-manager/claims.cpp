#include "pool-manager/claims.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <span>
#include <stdexcept>

#include "base/hmac.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostJob = 96;

bool isPart(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char one) {
    return std::isalnum(one) != 0 || std::strchr("_.+-", one) != nullptr;
  });
}

bool isNumber(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

void checkJob(const std::string& job) {
  const size_t first = job.find(':');
  const size_t second = first == std::string::npos ? first : job.find(':', first + 1);
  if (job.size() <= kMostJob && second != std::string::npos && isPart(job.substr(0, first)) &&
      isPart(job.substr(first + 1, second - first - 1)) && isNumber(job.substr(second + 1)))
    return;
  throw std::invalid_argument(
      "a job is named CLUSTER:ID:RESTARTS, for example alps:4711:0, of letters, digits and _.+- , in at "
      "most " +
      std::to_string(kMostJob) + " bytes");
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
