#include "worker/torch/inference_threads.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include <ATen/Parallel.h>

namespace bulkhead::worker {

namespace {

/// Empty if the kernel does not tell, or has more cores than a cpu_set_t holds. Must first be
/// called before any thread is bound.
const std::vector<int>& cores() {
    static const std::vector<int> all = [] {
        cpu_set_t allowed;
        CPU_ZERO(&allowed);
        std::vector<int> found;
        if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return found;
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &allowed)) found.push_back(core);
        return found;
    }();
    return all;
}

}  // namespace

int allowed_cores() { return std::max(1, static_cast<int>(cores().size())); }

int inference_threads(const config::ModelSpec& spec) {
    return spec.threads > 0 ? static_cast<int>(spec.threads) : allowed_cores();
}

void use_threads(int count) {
    thread_local int used = 0;
    if (used == count) return;
    at::set_num_threads(count);
    used = count;
}

std::vector<int> team_places(int count, const std::vector<int>& cores, int process) {
    if (count < 2 || static_cast<std::size_t>(count) != cores.size()) return {};
    std::vector<int> places = cores;
    std::ranges::rotate(places, places.begin() + process % count);
    return places;
}

void bind_team(int count) {
    use_threads(count);
    const std::vector<int> places = team_places(count, cores(), ::getpid());
    if (places.empty()) return;
#pragma omp parallel num_threads(count)
    if (omp_get_num_threads() == count) {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(places[static_cast<std::size_t>(omp_get_thread_num())], &own);
        (void)::sched_setaffinity(0, sizeof own, &own);  // if refused, the kernel places the thread
    }
}

}  // namespace bulkhead::worker
