#pragma once
// A stream that gives a peer up which does not take what is written to it: each write has a time limit.

#include <kj/async-io.h>
#include <kj/timer.h>

namespace gpupool::pool::rest {

kj::Own<kj::AsyncIoStream> carefulStream(kj::Own<kj::AsyncIoStream> inner, kj::Timer& timer,
                                         kj::Duration limit);

}  // namespace gpupool::pool::rest
