#pragma once
// How a lease lies in the store: schema::StoredLease under "lease/<id>".

#include <string>

#include "pool-manager/pool.h"

namespace gpupool::pool {

inline const std::string kLeasePrefix = "lease/", kEndedPrefix = "ended/", kEpochKey = "epoch";

std::string encodeRecord(const LeaseRecord& record, const std::string& bootId);
// Throws std::runtime_error if the bytes are no such record.
// bootId: of now; what the record says of processes holds within one boot.
LeaseRecord decodeRecord(const std::string& bytes, const std::string& bootId);

}  // namespace gpupool::pool
