#pragma once
// A stream that reads no further while what was written to it has not left: whoever does not take answers is
// asked no more, instead of having them pile up. Cap'n Proto's own limit counts calls under way, and a call
// is over when its answer is queued.
//
// For the side that answers; two of them facing each other could wait for each other.

#include <kj/async-io.h>

namespace gpupool::pool {

kj::Own<kj::AsyncIoStream> patientStream(kj::Own<kj::AsyncIoStream> inner);

}  // namespace gpupool::pool
