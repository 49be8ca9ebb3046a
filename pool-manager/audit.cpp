#include "pool-manager/audit.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool-manager/convert.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostErased = 16;  // with one entry: the bound may have become lower

// In the order of the numbers.
std::string keyOf(uint64_t number) {
  const std::string digits = std::to_string(number);
  return kAuditPrefix + std::string(20 - std::min<size_t>(20, digits.size()), '0') + digits;
}

std::string encode(const AuditEntry& entry) {
  capnp::MallocMessageBuilder message;
  pool::write(entry, message.initRoot<schema::AuditEntry>());
  const auto words = capnp::messageToFlatArray(message);
  return {words.asChars().begin(), words.asChars().size()};
}

AuditEntry decode(const std::string& bytes) try {
  auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), words.size() * sizeof(capnp::word));
  capnp::FlatArrayMessageReader message(words);
  return read(message.getRoot<schema::AuditEntry>());
} catch (const kj::Exception& error) {
  throw std::runtime_error(std::string("store: an audit entry cannot be read: ") +
                           error.getDescription().cStr());
}

}  // namespace

const char* name(AuditEvent event) {
  constexpr const char* kNames[] = {
      "queued",        "unserved",    "granted",     "suspended", "resumed",  "moving",     "moved",
      "released",      "expired",     "revoked",     "lost",      "cordoned", "uncordoned", "token-created",
      "token-revoked", "quota-set",   "adopted",     "left",      "held",     "restored",   "preempting",
      "server-alive",  "server-lost", "server-left", "stayed"};
  return event <= AuditEvent::stayed ? kNames[static_cast<uint32_t>(event)] : "unknown";
}

void AuditLog::load(const std::vector<Entry>& stored) {
  for (const Entry& one : stored) {
    entries_.push_back(decode(one.value));
    last_ = std::max(last_, entries_.back().number);
  }
}

std::deque<AuditEntry>::const_iterator AuditLog::after(uint64_t number) const {
  return std::partition_point(entries_.begin(), entries_.end(),
                              [number](const AuditEntry& one) { return one.number <= number; });
}

AuditLog::Pending AuditLog::write(AuditEntry entry, std::vector<Write>& writes) {
  if (most_ == 0) return {};
  entry.number = ++last_;
  writes.push_back({keyOf(entry.number), encode(entry)});
  Pending pending{std::move(entry), 0};
  const size_t beyond = entries_.size() + 1 - std::min(entries_.size() + 1, most_);
  for (size_t i = 0; i < std::min(beyond, kMostErased); ++i) {
    pending.erased = entries_[i].number;
    writes.push_back({keyOf(pending.erased), std::nullopt});
  }
  return pending;
}

void AuditLog::accepted(Pending pending) {
  if (pending.entry.number == 0) return;
  while (!entries_.empty() && entries_.front().number <= pending.erased) entries_.pop_front();
  entries_.push_back(std::move(pending.entry));
}

}  // namespace gpupool::pool
