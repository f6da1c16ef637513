// Requires that a system call succeeds; otherwise the program ends.
#include <stdio.h>
#include <stdlib.h>

#define MUST(what)                                                     \
    do {                                                               \
        if (!(what)) {                                                 \
            fprintf(stderr, "line %d: %s failed: %m\n", __LINE__, #what); \
            exit(1);                                                   \
        }                                                              \
    } while (0)
