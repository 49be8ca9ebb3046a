#pragma once
// A claim: a lease that a job scheduler makes for a job before its programs start. It is stored, placed,
// moved, suspended and ended like any other lease. What is its own:
//
// Its id follows from its tenant and its job, "cluster:id:restart count": so to ask again gives the same
// claim, also where the answer was lost, and a job that was requeued, whose restart count is another, has
// another claim.
//
// A scheduler that may give a job's number again, because it has forgotten the job, says besides when the job
// was submitted: "cluster:id:restart count:time". Of one number the job that was submitted last is the one
// that there is: its claim ends those of earlier ones, and it is what the name without a time names.
//
// Programs adopt it, several at once or one after the other. Each adopter has a TTL of its own and renews. A
// claim ends when it is released, by whoever made it; and when no program has used it for its own TTL, after
// its grant or after the last adopter has gone.

#include <cstdint>
#include <string>

#include "schema/id.h"

namespace gpupool::pool {

inline constexpr uint32_t kUnusedMs = 120'000;  // a claim's TTL, if its request names none

// Throws std::invalid_argument, with a text for people, if that names no job.
void checkJob(const std::string& job);
// Of a job's name: without the time; and the time, 0: there is none. Times are compared, and mean nothing
// else.
std::string numberOf(const std::string& job);
uint64_t submittedAt(const std::string& job);
// The same text again and again gives the same id; other texts or tenants give others (SHA-256).
Id claimId(const std::string& tenant, const std::string& job);

}  // namespace gpupool::pool
