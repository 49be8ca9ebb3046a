#pragma once
// How the pool says that a lease is in no state for what is asked. Part of its implementation.

#include <stdexcept>
#include <string>

#include "pool-manager/pool.h"

namespace gpupool::pool {

[[noreturn]] inline void refuse(const LeaseRecord& record, const std::string& why) {
  throw std::invalid_argument("lease " + shortId(record.id) + " " + why);
}

// Something else is under way.
[[noreturn]] inline void refuseNow(const LeaseRecord& record) {
  const Change change = record.change;
  const bool suspends =
      change == Change::preempting || change == Change::suspending || change == Change::storing;
  const bool written = change == Change::copying || (suspends && record.intoFiles);
  refuse(record, isMove(change)                ? "is being moved at this moment"
                 : written                     ? "is being written into files at this moment"
                 : change == Change::goingBack ? "is being restored at this moment"
                 : suspends                    ? "is being suspended at this moment"
                                               : "is being resumed at this moment");
}

}  // namespace gpupool::pool
