#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "tests/fakes/fake_cuda/fake.h"

namespace fake_cuda {
namespace {

struct Rule {
    CUresult code = 0;
    unsigned long after = 0;
    unsigned long calls = 0;
};

struct Rules {
    std::mutex mutex;
    std::string read_from;  ///< counting begins again with other rules
    std::map<std::string, Rule> by_function;
};

Rules& rules() {
    static Rules& all = *new Rules;
    return all;
}

std::atomic<bool> lost{false};

}  // namespace

std::unique_lock<std::mutex> lock_if_waits_block() {
    static auto& mutex = *new std::mutex;
    return std::getenv("BULKHEAD_FAKE_CUDA_WAITS_BLOCK") == nullptr ? std::unique_lock<std::mutex>{}
                                                                    : std::unique_lock{mutex};
}

CUresult injected(const char* function) {
    (void)lock_if_waits_block();
    const char* value = std::getenv("BULKHEAD_FAKE_CUDA_FAIL");
    const std::string wanted = value == nullptr ? "" : value;
    Rules& all = rules();
    const std::scoped_lock lock{all.mutex};
    if (wanted != all.read_from) {
        all.read_from = wanted;
        all.by_function.clear();
        std::istringstream list{wanted};
        for (std::string item; std::getline(list, item, ';');) {
            std::istringstream words{item};
            std::string name, after;
            Rule rule;
            words >> name >> rule.code >> after >> rule.after;
            all.by_function[name] = rule;
        }
    }
    std::string name = function;
    if (name.size() > 3 && name.substr(name.size() - 3, 2) == "_v") name.resize(name.size() - 3);
    const auto rule = all.by_function.find(name);
    if (rule == all.by_function.end()) return CUDA_SUCCESS;
    return rule->second.calls++ < rule->second.after ? CUDA_SUCCESS : rule->second.code;
}

void lose_context() { lost = true; }
bool context_is_lost() { return lost; }

}  // namespace fake_cuda
