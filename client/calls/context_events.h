#pragma once
// Events of all work of a context, or of a green context: cuCtxRecordEvent, cuCtxWaitEvent and the same of
// green contexts.
//
// A context is its streams here. For a record all of them meet in a stream that is made for this alone, so
// that none of them waits for another. For a wait, each of them waits, and so does the context's *gate*, a
// stream without work of its own: streams to come begin behind it. Threads: any.

#include "client/streams.h"

namespace gpupool::client {

// What streams ask when one is made (StreamHooks): it comes behind the gates of its context and of its green
// context.
CUresult orderNewStream(const StreamRef& ref);

}  // namespace gpupool::client
