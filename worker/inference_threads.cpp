#include "worker/inference_threads.h"

#include <sched.h>

#include <algorithm>

#include <ATen/Parallel.h>

namespace bulkhead::worker {

int allowed_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    return ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? std::max(1, CPU_COUNT(&allowed)) : 1;
}

int inference_threads(const config::ModelSpec& spec) {
    return spec.threads > 0 ? static_cast<int>(spec.threads) : allowed_cores();
}

void use_threads(int count) {
    thread_local int used = 0;
    if (used == count) return;
    at::set_num_threads(count);
    used = count;
}

}  // namespace bulkhead::worker
