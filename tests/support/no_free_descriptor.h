#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include "ipc/base/unique_fd.h"

namespace bulkhead::test {

/// Leaves this process without a free descriptor for the life of a test.
class NoFreeDescriptor {
public:
    NoFreeDescriptor() {
        ::getrlimit(RLIMIT_NOFILE, &before_);
        const UniqueFd lowest_free{::dup(0)};
        rlimit none = before_;
        none.rlim_cur = static_cast<rlim_t>(lowest_free.get());
        ::setrlimit(RLIMIT_NOFILE, &none);
    }
    ~NoFreeDescriptor() { ::setrlimit(RLIMIT_NOFILE, &before_); }

private:
    rlimit before_{};
};

}  // namespace bulkhead::test
