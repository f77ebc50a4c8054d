#include "worker/inference_threads.h"

#include <sched.h>

#include <algorithm>

#include <ATen/Parallel.h>

namespace bulkhead::worker {

int inference_threads(const config::ModelSpec& spec) {
    if (spec.threads > 0) return static_cast<int>(spec.threads);
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    return ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? std::max(1, CPU_COUNT(&allowed)) : 1;
}

void use_threads(int count) {
    thread_local int used = 0;
    if (used == count) return;
    at::set_num_threads(count);
    used = count;
}

}  // namespace bulkhead::worker
