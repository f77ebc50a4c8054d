#include "worker/executor.h"

#include <pthread.h>

namespace bulkhead::worker {

Executor::Executor() {
    post([] {
        ::pthread_setname_np(::pthread_self(), "executor");
        static thread_local const SignalStack stack;  // a model that recurses too deep is reported as well
    });
}

}  // namespace bulkhead::worker
