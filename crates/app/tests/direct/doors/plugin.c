// The C library as a plug-in loaded with RTLD_DEEPBIND sees it: past every preloaded library.
#include "doors.h"

static const struct functions FUNCTIONS = {
    open, close, dup, dup2, lseek, read, write, pread, pwrite, preadv, pwritev, ftruncate, fsync,
};

const struct functions *doors_functions(void)
{
    return &FUNCTIONS;
}
