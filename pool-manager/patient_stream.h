#pragma once
// A stream with back-pressure: it reads nothing while what was written to it has not been sent. A peer that
// does not read its answers gets no further calls served, and its answers do not pile up. Cap'n Proto's own
// limit counts only calls in progress, and a call is finished when its answer is queued.
//
// For the answering side only: two such streams at both ends could wait for each other.

#include <kj/async-io.h>

namespace gpupool::pool {

kj::Own<kj::AsyncIoStream> patientStream(kj::Own<kj::AsyncIoStream> inner);

}  // namespace gpupool::pool
