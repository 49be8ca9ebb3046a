#include "pool-manager/records.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <cstring>
#include <stdexcept>

#include "pool-manager/convert.h"

namespace gpupool::pool {

std::string encodeRecord(const LeaseRecord& record, const std::string& bootId) {
  capnp::MallocMessageBuilder message;
  auto root = message.initRoot<schema::StoredLease>();
  write(record.lease, root.initLease(), Secrets::include);
  root.setState(static_cast<uint32_t>(record.state));
  root.setDeadlineMs(record.deadlineMs);
  root.setBootId(bootId);
  root.setReason(record.reason);
  root.setHolderPid(static_cast<uint32_t>(record.process.pid));
  root.setHolderStartTicks(record.process.startTicks);
  const auto words = capnp::messageToFlatArray(message);
  return {words.asChars().begin(), words.asChars().size()};
}

LeaseRecord decodeRecord(const std::string& bytes, const std::string& bootId) try {
  auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), words.size() * sizeof(capnp::word));
  capnp::FlatArrayMessageReader message(words);
  const auto root = message.getRoot<schema::StoredLease>();
  LeaseRecord record;
  record.lease = read(root.getLease());
  record.state = root.getState() == static_cast<uint32_t>(LeaseState::revoking) ? LeaseState::revoking
                                                                                : LeaseState::granting;
  record.deadlineMs = root.getDeadlineMs();
  record.reason = text(root.getReason());
  if (text(root.getBootId()) == bootId)
    record.process = {static_cast<int>(root.getHolderPid()), root.getHolderStartTicks()};
  return record;
} catch (const kj::Exception& error) {
  throw std::runtime_error(std::string("store: a lease cannot be read: ") + error.getDescription().cStr());
}

}  // namespace gpupool::pool
