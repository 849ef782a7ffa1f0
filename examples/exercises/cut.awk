# cut.awk: makes starter.c of solution.c: awk -f cut.awk solution.c >starter.c
# A region begins with the line /* >> name */ and ends with /* << text */. The text takes the place of the region.
/^ *\/\* >> .* \*\/$/ { inside = 1; next }
/^ *\/\* << .* \*\/$/ { sub(/\/\* << /, ""); sub(/ \*\/$/, ""); inside = 0 }
!inside
